"""Pushes to doubles of vLLM 0.33.0 and SGLang 0.5.23 over real HTTP."""

from __future__ import annotations

import functools
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit import wait_until
from testkit.services.inference_servers import Double, SglangDouble, VllmDouble, serving
from turnstream.errors import RejectedError, UnavailableError
from turnstream_server.trainer.inference_servers import InferenceServer, inference_server
from turnstream_server.trainer.publishing import Pushes

KINDS = ("vllm", "sglang")
RELOAD = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
LOAD_ADAPTER = {"vllm": "/v1/load_lora_adapter", "sglang": "/load_lora_adapter"}


@pytest.fixture
def vllm() -> Iterator[tuple[VllmDouble, str]]:
    double = VllmDouble()
    with serving(double.app()) as url:
        yield double, url


@pytest.fixture
def sglang() -> Iterator[tuple[SglangDouble, str]]:
    double = SglangDouble()
    with serving(double.app()) as url:
        yield double, url


@pytest.fixture(params=KINDS)
def either(request: pytest.FixtureRequest) -> tuple[str, Double, str]:
    """The kind of a server, its double and its address."""
    double, url = request.getfixturevalue(request.param)
    return request.param, double, url


def client(kind: str, url: str, **options: Any) -> InferenceServer:
    return inference_server(f"{kind}={url}", adapter="demo", **options)


def model_folder(parent: Path, version: int, *, file: str = "model.safetensors") -> Path:
    folder = parent / f"v{version}"
    folder.mkdir()
    (folder / file).write_text("{}")
    return folder


adapter_folder = functools.partial(model_folder, file="adapter_config.json")


def wait_for_failures(pushes: Pushes, number: int) -> None:
    wait_until(lambda: pushes.statistics()["num_failed_pushes"] == number, 60.0, "a refusal")


def test_vllm_reloads_a_model_while_paused_and_sglang_in_one_call(
    either: tuple[str, Double, str], tmp_path: Path
) -> None:
    kind, double, url = either
    folder = model_folder(tmp_path, 7)

    client(kind, url).load(7, folder)

    calls = {
        "vllm": [
            *("/pause", "/update_weight_version", "/collective_rpc"),
            *("/reset_prefix_cache", "/update_weight_version", "/resume"),
        ],
        "sglang": ["/update_weights_from_disk"],
    }
    assert double.calls == calls[kind]
    assert (double.weights, double.weight_version, double.is_paused) == (str(folder), "7", False)


def test_adapters_are_named_by_version_and_the_oldest_unloaded(
    either: tuple[str, Double, str], tmp_path: Path
) -> None:
    kind, double, url = either
    double.adapters = {"other-v1": "/other", "demo-2-v1": "/other"}
    server = client(kind, url)

    for version in range(5):
        server.load(version, adapter_folder(tmp_path, version))

    assert double.adapters == {
        "other-v1": "/other",
        "demo-2-v1": "/other",
        **{f"demo-v{version}": str(tmp_path / f"v{version}") for version in (2, 3, 4)},
    }


def test_adapter_loads_again_and_after_another_trainer_unloads(
    either: tuple[str, Double, str], tmp_path: Path
) -> None:
    kind, double, url = either
    folder = adapter_folder(tmp_path, 7)
    double.adapters = {"demo-v7": "/of/a/run/with/this/name/before"}

    client(kind, url, api_key="secret").load(7, folder)

    assert double.adapters == {"demo-v7": str(folder)}
    assert double.authorization == "Bearer secret"
    double.adapters = {"demo-v1": "/folder"}
    double.faults[LOAD_ADAPTER[kind].replace("load", "unload")] = [404]
    client(kind, url).load(7, folder)
    assert "demo-v7" in double.adapters


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (400, RejectedError, "HTTP 400: injected 400"),
        (503, UnavailableError, "HTTP 503"),
        (None, UnavailableError, "Timeout"),
    ],
)
@pytest.mark.parametrize("is_adapter", [False, True])
def test_failed_call_raises_the_reason_of_the_server(
    either: tuple[str, Double, str],
    tmp_path: Path,
    fault: int | None,
    error: type[Exception],
    message: str,
    is_adapter: bool,
) -> None:
    kind, double, url = either
    double.faults[(LOAD_ADAPTER if is_adapter else RELOAD)[kind]] = [fault]
    folder = adapter_folder(tmp_path, 7) if is_adapter else model_folder(tmp_path, 7)

    with pytest.raises(error, match=message):
        client(kind, url, timeout_s=0.3).load(7, folder)


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("vllm", "/pause", "<html>a proxy</html>"),
        ("vllm", "/pause", '["paused"]'),
        ("vllm", "/update_weight_version", "ok"),
        ("sglang", "/update_weights_from_disk", '{"success": false, "message": "no"}'),
        ("sglang", "/update_weights_from_disk", "{}"),
        *((kind, "/v1/models", body) for kind in KINDS for body in ("{}", '{"data": "x"}')),
    ],
)
def test_body_that_no_server_sends_is_refused(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, path: str, body: str
) -> None:
    double, url = request.getfixturevalue(kind)
    double.faults[path] = [body]

    folder = adapter_folder if path == "/v1/models" else model_folder
    with pytest.raises(RejectedError, match=path):
        client(kind, url).load(7, folder(tmp_path, 7))


def test_vllm_after_a_failed_call_has_no_version_and_names_its_setting(
    vllm: tuple[VllmDouble, str], tmp_path: Path
) -> None:
    double, url = vllm

    with pytest.raises(RejectedError, match="no weights in"):
        client("vllm", url).load(7, tmp_path)
    assert (double.weight_version, double.is_paused) == ("unknown", False)

    double.faults["/reset_prefix_cache"] = ['{"success": false}']
    with pytest.raises(UnavailableError, match="still in use"):
        client("vllm", url).load(7, model_folder(tmp_path, 7))
    assert double.weight_version == "unknown"

    for path, folder, setting in (
        ("/pause", model_folder(tmp_path, 8), "VLLM_SERVER_DEV_MODE=1"),
        ("/v1/load_lora_adapter", adapter_folder(tmp_path, 9), "VLLM_ALLOW_RUNTIME_LORA"),
    ):
        double.faults[path] = [404]
        with pytest.raises(RejectedError, match=setting):
            client("vllm", url).load(7, folder)


def test_busy_server_is_asked_again_until_it_loads(
    sglang: tuple[SglangDouble, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    double, url = sglang
    double.faults["/update_weights_from_disk"] = [503, 503, 503]
    pushes = Pushes([client("sglang", url)])

    pushes.push(0, model_folder(tmp_path, 0), timeout_s=60.0)
    wait_until(lambda: double.weight_version == "0", 60.0, "the version")
    wait_until(lambda: not pushes.statistics()["num_servers_behind"], 60.0, "its record")
    pushes.close()

    assert pushes.statistics() == {"num_servers_behind": 0, "num_failed_pushes": 3}
    assert [each.levelno for each in caplog.records].count(logging.WARNING) == 1


def test_refusing_server_gets_the_next_version_and_no_repeat(
    sglang: tuple[SglangDouble, str], tmp_path: Path
) -> None:
    double, url = sglang
    double.faults["/update_weights_from_disk"] = [400, 400]
    pushes = Pushes([client("sglang", url)])

    for version in (0, 1):
        pushes.push(version, model_folder(tmp_path, version), timeout_s=60.0)
        wait_for_failures(pushes, version + 1)
    pushes.push(2, model_folder(tmp_path, 2), timeout_s=60.0)
    wait_until(lambda: not pushes.statistics()["num_servers_behind"], 60.0, "version 2")
    pushes.close()

    assert pushes.statistics()["num_failed_pushes"] == 2
    assert double.calls == ["/update_weights_from_disk"]
    assert double.weight_version == "2"


def test_silent_server_delays_one_version_only(
    vllm: tuple[VllmDouble, str], sglang: tuple[SglangDouble, str], tmp_path: Path
) -> None:
    double = vllm[0]
    double.faults["/pause"] = [None]
    pushes = Pushes([client("vllm", vllm[1], timeout_s=20.0), client("sglang", sglang[1])])
    pushes.push(0, model_folder(tmp_path, 0), timeout_s=0.3)

    started_s = time.monotonic()
    pushes.push(1, model_folder(tmp_path, 1), timeout_s=60.0)

    assert time.monotonic() - started_s < 15.0  # the silent call lasts 20 s
    assert sglang[0].weight_version == "1"
    assert pushes.statistics()["num_servers_behind"] == 1
    pushes.close()


def test_server_that_starts_late_gets_the_newest_version_alone(tmp_path: Path) -> None:
    double = SglangDouble()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    pushes = Pushes([client("sglang", f"http://127.0.0.1:{port}")])
    pushes.push(0, model_folder(tmp_path, 0), timeout_s=60.0)  # connection refused
    assert pushes.statistics()["num_servers_behind"] == 1
    pushes.push(1, model_folder(tmp_path, 1), timeout_s=60.0)

    with serving(double.app(), port=port):
        wait_until(lambda: not pushes.statistics()["num_servers_behind"], 60.0, "the version")
        pushes.close()

    assert (double.weight_version, double.calls) == ("1", ["/update_weights_from_disk"])
