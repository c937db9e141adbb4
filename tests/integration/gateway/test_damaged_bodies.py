"""Damaged and random requests to every route of the application: no answer is a 5xx.

The routes are those of the application, so that a new one cannot be left out.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import httpx2
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from testkit.requests.tinker_api import Api
from testkit.services.gateway_thread import GatewayThread
from testkit.services.gateways import tinker_paths
from testkit.training.canned_worker import BASE, CannedWorker
from turnstream.wire import tinker_pb2 as wire
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.app import PREFIX
from turnstream_server.gateway.tinker.encodings import PROTOBUF

_PATHS = tinker_paths()
ROUTES: Final = [(method, path) for path, methods in _PATHS.items() for method in methods]

NUM_EXAMPLES: Final = settings().max_examples // 2
JSON: Final = "application/json"
_JSON_HEADERS: Final = {"content-type": JSON}

WRONG: Final = [
    *(None, True, -1, 0.5, 2**63, 10**400, float("nan"), [2**50]),
    *("", "\ud800", "a\0b" + "x" * 3_000, [], {"": None}),
]
"""Values in place of each value of a valid body; the second text is half a surrogate pair."""

TEXTS = st.text(max_size=12) | st.sampled_from([each for each in WRONG if isinstance(each, str)])
NUMBERS = st.integers() | st.floats()
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)

Place = tuple[Any, ...]

_numbers = itertools.count(1)


class Target(NamedTuple):
    """A gateway with a session, a model and a sampling session.

    Attributes:
        http: client of the gateway, with a key.
        ids: ids of things that exist, by the names of parameters and fields.
    """

    http: httpx2.Client
    ids: dict[str, str]

    def send(self, method: str, path: str, **content: Any) -> httpx2.Response:
        """Return an answer that is no error of the gateway."""
        answer = self.http.request(method, path, **content)
        assert answer.status_code < 500, (answer.status_code, answer.text)
        assert "internal error" not in answer.text
        return answer


@pytest.fixture(scope="module")
def target(server: EmbeddedServer) -> Iterator[Target]:
    base = BASE._replace(name="tiny/damaged")
    headers = {"X-API-Key": "tml-damaged"}
    with (
        CannedWorker(server.url, base),
        GatewayThread(server.url, poll_s=0.02) as gateway,
        httpx2.Client(base_url=gateway.base_url, headers=headers, timeout=60) as http,
    ):
        api = Api(gateway, base, key="tml-damaged")
        with api.http:
            ids = _ids(api)
        yield Target(http, ids)


def _ids(api: Api) -> dict[str, str]:
    session = api.session()
    model, sampler = api.model(session), api.sampler(session)
    call = {"model_id": model, "seq_id": next(_numbers), "path": "saved"}
    path = api.result(api.answer("save_weights", **call)["request_id"])["path"]
    sample = api.sample(sampler, 0).json()["request_id"]
    api.result(sample)
    return {
        "session_id": session,
        "base_model": api.base.name,
        "model_id": model,
        "request_id": sample,
        "sampler_id": sampler,
        "sampling_session_id": sampler,
        "kind": "weights",
        "name": "saved",
        "ended": api.session(),
        "path": path,
        "tinker_path": path,
    }


DATUM: Final = {
    "model_input": {"chunks": [{"tokens": [5], "type": "encoded_text"}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [6], "dtype": "int64", "shape": [1]},
        "logprobs": {"data": [-1.0], "dtype": "float32"},
        "advantages": {"data": [1.0], "dtype": "float32"},
    },
}
TRAINING: Final = {"data": [DATUM], "loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 0.8}}
SPARSE: Final = {
    "model_input": {"chunks": [{"tokens": [5]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [6], "dtype": "int64", "shape": [1, 1]},
        "weights": {
            "data": [1.0],
            "dtype": "float32",
            "shape": [1, 1],
            "sparse_crow_indices": [0, 1],
            "sparse_col_indices": [0],
        },
    },
}
_CALL: Final = {"model_id": "", "seq_id": 1}
_NO_BODY: dict[str, Any] = {}
FINISH: Final = "sessions/{session_id}/finish"

BODIES: Final[dict[str, dict[str, Any]]] = {
    "retrieve_future": {"request_id": ""},
    "cancel_future": {"request_id": ""},
    "create_sampling_session": {
        "session_id": "",
        "sampling_session_seq_id": 1,
        "base_model": "",
        "model_path": None,
    },
    "asample": {
        "sampling_session_id": "",
        "seq_id": 1,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "sampling_params": {
            "max_tokens": 2,
            "seed": 1,
            "stop": ["a"],
            "temperature": 1.0,
            "top_k": -1,
            "top_p": 1.0,
        },
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 0,
    },
    "forward_backward": {**_CALL, "forward_backward_input": TRAINING, "forward_only": False},
    "forward": {**_CALL, "forward_input": {"data": [SPARSE], "loss_fn": "cross_entropy"}},
    "forward_backward_run": {
        **_CALL,
        "run": "maze",
        "loss_fn": "ppo",
        "loss_fn_config": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    },
    "optim_step": {
        **_CALL,
        "adam_params": {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8},
    },
    "save_weights": {**_CALL, "path": "saved", "ttl_seconds": 60, "user_metadata": {"a": "b"}},
    "save_weights_for_sampler": {**_CALL, "path": "sampled", "kind": "snapshot"},
    "save_weights_external": {
        **_CALL,
        "path": "outside",
        "ttl_seconds": 60,
        "age_encryption_recipients": ["age1q"],
    },
    "client/config": _NO_BODY,
    "client/dynamic_config": _NO_BODY,
    "telemetry": {"events": [{"event": "SESSION_START"}], "session_id": ""},
    "create_session": {
        "tags": ["a"],
        "user_metadata": {"a": [1]},
        "sdk_version": "0.38.0",
        "display_name": "a",
    },
    "session_heartbeat": {"session_id": ""},
    FINISH: {"reason": {"type": "success"}, "detail": "done"},
    "create_model": {
        "session_id": "",
        "model_seq_id": 1,
        "base_model": "",
        "user_metadata": {"a": 1},
        "lora_config": {"rank": 8, "seed": 1, "train_mlp": True},
        "optimizer_config": {"type": "adamw"},
    },
    "load_weights": {**_CALL, "path": "", "optimizer": True},
    "get_info": {"model_id": ""},
    "weights_info": {"tinker_path": ""},
    "training_runs/{model_id}/checkpoints/{kind}/{name}/ttl": {"ttl_seconds": 3_600},
    "training_runs/{model_id}/checkpoints/{kind}/{name}/publish": _NO_BODY,
}
"""A valid body of each route that has one; "" and the number of a call are filled in."""


def test_every_route_with_a_body_has_a_valid_one() -> None:
    with_body = {path for method, path in ROUTES if method in ("post", "put", "patch")}

    assert {f"{PREFIX}/{route}" for route in BODIES} == with_body


def places_of(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the place of each value in a JSON value, that of itself first."""
    yield place
    items = enumerate(value) if isinstance(value, list) else ()
    for name, inner in value.items() if isinstance(value, dict) else items:
        yield from places_of(inner, (*place, name))


def changed(value: Any, place: Place, *new: Any) -> Any:
    """Return a JSON value with another value at one place, or without it; {} without all."""
    if not place:
        return new[0] if new else {}
    first, *rest = place
    copied = value.copy()
    if rest or new:
        copied[first] = changed(value[first], tuple(rest), *new)
    else:
        del copied[first]
    return copied


@st.composite
def damaged_bodies(draw: st.DrawFn, valid: dict[str, Any]) -> bytes:
    """Draw a valid body with one place changed or missing, or with damaged bytes, or any bytes."""
    place = draw(st.sampled_from([*places_of(valid)]))
    content = draw(
        st.one_of(
            st.builds(changed, st.just(valid), st.just(place), VALUES),
            st.just(changed(valid, place)),
            VALUES,
        )
    )
    body = json.dumps(content).encode()
    if draw(st.integers(0, 3)):
        return body
    cut = draw(st.integers(0, len(body)))
    return draw(st.sampled_from([body[:cut], body[:cut] + b"\xff" + body[cut:]])) or draw(
        st.binary(max_size=40)
    )


def fuzzing(check: Callable[..., None]) -> Callable[[], None]:
    """Return a test of random values, the same in each run."""
    return settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )(given(st.data())(check))


def filled(body: dict[str, Any], ids: dict[str, str]) -> dict[str, Any]:
    """Return a body with ids of things that exist, and with a number of its own."""
    found = {name: ids.get(name, value) if value == "" else value for name, value in body.items()}
    return found | ({"seq_id": next(_numbers)} if "seq_id" in body else {})


@pytest.mark.parametrize("route", BODIES)
def test_wrong_value_is_no_server_error(target: Target, route: str) -> None:
    path = f"{PREFIX}/{route}"
    method = "put" if "put" in _PATHS[path] else "post"
    sent_to = _path(path, lambda name: target.ids[name])

    answer = target.send(method, sent_to, json=filled(BODIES[route], target.ids))
    assert answer.status_code == 200, answer.text

    for place in places_of(BODIES[route]):
        for content in (
            changed(filled(BODIES[route], target.ids), place),
            *(changed(filled(BODIES[route], target.ids), place, each) for each in WRONG),
        ):
            target.send(method, sent_to, content=json.dumps(content), headers=_JSON_HEADERS)
    _check_answers(target)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_damaged_request_is_no_server_error(target: Target, method: str, path: str) -> None:
    valid = BODIES.get(path.removeprefix(f"{PREFIX}/"))

    def check(data: st.DataObject) -> None:
        def value(name: str) -> str:
            known = st.just(target.ids.get(name, "x"))
            return data.draw(known | known | TEXTS.filter(bool))

        content: dict[str, Any] = {}
        if valid is not None:
            content["content"] = data.draw(damaged_bodies(filled(valid, target.ids)))
            kinds = st.sampled_from([JSON, JSON, JSON, PROTOBUF, "", "text/plain"])
            content["headers"] = {"content-type": data.draw(kinds)}
        elif method == "get":
            values = NUMBERS.map(str) | TEXTS.map(lambda text: text.encode("utf-8", "replace"))
            content["params"] = {name: data.draw(values) for name in ("limit", "offset")}
        target.send(method, _path(path, value), **content)

    fuzzing(check)()
    _check_answers(target)


def _check_answers(target: Target) -> None:
    """Check that the gateway and its store still answer."""
    assert target.send("get", f"{PREFIX}/healthz").json() == {"status": "ok"}
    assert target.send("get", f"{PREFIX}/get_server_capabilities").status_code == 200


def _path(path: str, value: Callable[[str], str]) -> str:
    """Return the path of a route with a value for each parameter."""
    if path.endswith(FINISH):
        path = path.replace("session_id", "ended")
    return re.sub(r"{(\w+)}", lambda found: quote(value(found[1]), safe="", errors="replace"), path)


@pytest.mark.parametrize("route", ["forward_backward", "forward"])
def test_damaged_protobuf_call_is_no_server_error(target: Target, route: str) -> None:
    tokens = wire.Chunk(encoded_text=wire.Tokens(tokens=b"\5\0\0\0"))
    targets = wire.Tensor(dense=b"\6" + bytes(7), dtype=wire.DTYPE_INT64, shape=[1])

    def check(data: st.DataObject) -> None:
        datum = wire.Datum(model_input=[tokens], loss_fn_inputs={"target_tokens": targets})
        number = 20_000 + next(_numbers)  # always of 3 bytes: the draws below need one length
        message = wire.ForwardBackwardRequest(
            model_id=target.ids["model_id"], seq_id=number, data=[datum]
        )
        message.loss_fn = data.draw(st.sampled_from(["cross_entropy", "ppo", ""]))
        body = bytearray(message.SerializeToString())
        for _ in range(data.draw(st.integers(0, 3))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        headers = {"content-type": PROTOBUF}
        target.send("post", f"{PREFIX}/{route}", content=bytes(body), headers=headers)

    fuzzing(check)()
