"""Links to the files of exported weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis

from testkit.services.gateway_thread import GatewayThread
from testkit.training.canned_worker import CannedWorker
from turnstream_server.operations.checkpoints import CheckpointPath, folder_of
from turnstream_server.operations.keys import download_key

FILES = {"adapter_config.json": b"{}", "parts/of 1%.safetensors": bytes(range(256)) * 1000}


@pytest.fixture
def api(
    new_gateway: Callable[..., GatewayThread],
    new_api: Callable[..., Any],
    worker: CannedWorker,
    tmp_path: Path,
) -> Any:
    return new_api(new_gateway(folder=tmp_path))


def _exported(api: Any, shared: Path, *, name: str = "final") -> str:
    """Return the path of the checkpoint of an export, whose files are in the shared folder."""
    sent = api.answer("save_weights_external", model_id=api.model(), seq_id=1, path=name)
    path = api.result(sent["request_id"])["path"]
    folder = shared / folder_of(CheckpointPath.parse(path))
    for file, content in FILES.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    return path


def _links(path: str) -> str:
    _, _, model_id, kind, name = path.split("/")
    return f"training_runs/{model_id}/checkpoints/{kind}/{name}/external_weights_urls"


def test_links_give_the_files_without_a_key(api: Any, tmp_path: Path) -> None:
    path = _exported(api, tmp_path, name="a b")

    urls = api.get(_links(path))["urls"]

    assert {name: httpx2.get(url).content for name, url in urls.items()} == FILES


def test_links_are_unreadable_without_their_token_or_beside_the_files(
    api: Any, tmp_path: Path, client: redis.Redis
) -> None:
    urls = api.get(_links(_exported(api, tmp_path)))["urls"]
    (tmp_path / "secret").write_text("s")
    url = urls["adapter_config.json"]
    token = url.split("/")[-2]

    wrong = [
        url.replace(token, token[:-1]),
        url.replace("adapter_config.json", "other.json"),
        url.replace("adapter_config.json", "%2e%2e/%2e%2e/%2e%2e/%2e%2e/secret"),
        url.replace("adapter_config.json", str(tmp_path / "secret")),
    ]

    assert [httpx2.get(each).status_code for each in wrong] == [404] * 4
    assert 3500 < client.ttl(download_key(token)) <= 3600  # pyright: ignore[reportOperatorIssue]
    client.delete(download_key(token))
    assert "expired" in httpx2.get(url).json()["detail"]


def test_links_end_with_the_checkpoint(api: Any, tmp_path: Path) -> None:
    path = _exported(api, tmp_path)
    url = api.get(_links(path))["urls"]["adapter_config.json"]

    deleted = api.http.delete(_links(path).removesuffix("/external_weights_urls"))

    assert deleted.status_code == 204
    assert httpx2.get(url).status_code == 404
    assert api.http.get(_links(path)).status_code == 404


def test_only_the_owner_gets_links_and_only_of_exports_on_this_disk(
    api: Any, new_gateway: Callable[..., GatewayThread], new_api: Callable[..., Any], tmp_path: Path
) -> None:
    gateway = new_gateway(folder=tmp_path / "elsewhere")
    path = _exported(api, tmp_path)
    other_key = new_api(gateway, key="tml-other").http.get(_links(path))
    other_disk = new_api(gateway).http.get(_links(path))
    no_folder = new_api(new_gateway()).http.get(_links(path))
    weights = api.http.get(_links(path).replace("external_weights/", "weights/"))

    assert [each.status_code for each in (other_key, other_disk, weights)] == [404] * 3
    assert "no checkpoint" in other_key.json()["detail"]
    assert "not on the disk" in other_disk.json()["detail"]
    assert (no_folder.status_code, "--folder" in no_folder.json()["detail"]) == (400, True)
