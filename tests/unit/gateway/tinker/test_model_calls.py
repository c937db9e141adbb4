"""Numbered calls without datums; `recorded/` has bodies of real releases of the SDK."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from turnstream.errors import RecordError
from turnstream_server.gateway.tinker.model_calls import ModelCall, read_model_call
from turnstream_server.operations.checkpoints import CheckpointPath
from turnstream_server.operations.contents import (
    LoadWeights,
    OptimStep,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
)
from turnstream_server.operations.results import Failure

RECORDED = Path(__file__).parent / "recorded"
RECIPIENT = "age10tprv6shyzh8k6z3y4uj6s0wu75td07y4r8k4wmp96fq5ser9cyqsts27q"
ROUTES = {
    "optim_step": "optim_step",
    "save_weights": "save_weights",
    "save_for_sampler": "save_weights_for_sampler",
    "save_external": "save_weights_external",
    "load_weights": "load_weights",
}


def _read(name: str, *, release: str = "0.38.0", **changes: Any) -> ModelCall:
    content = json.loads((RECORDED / f"{name}-{release}.json").read_bytes()) | changes
    return read_model_call(json.dumps(content).encode(), route=ROUTES[name])


@pytest.mark.parametrize(
    ("name", "release", "place", "expected"),
    [
        (
            *("optim_step", "0.38.0", ("S:train:0", 3)),
            OptimStep(learning_rate=0.01, weight_decay=0.5),
        ),
        ("optim_step", "0.16.1", ("S:train:0", 3), OptimStep(0.01, 0.9, 0.95, 1e-12, 0.0, 0.0)),
        (
            *("save_weights", "0.38.0", ("S:train:0", 4)),
            SaveWeights("000002", 604800, True, {"renderer_name": "role_colon"}),
        ),
        (
            *("save_for_sampler", "0.38.0", ("S:train:0", 5)),
            SaveForSampler("", 0, "inflight", None, {}),
        ),
        (
            *("save_for_sampler", "0.16.1", ("S:train:0", 5)),
            SaveForSampler("final", None, "snapshot", None, {}),
        ),
        (*("save_external", "0.38.0", ("S:train:0", 6)), SaveExternal("final", 3600, [RECIPIENT])),
        (
            *("load_weights", "0.38.0", ("S:train:1", 1)),
            LoadWeights(CheckpointPath("S:train:0", "weights", "000002"), optimizer=True),
        ),
    ],
)
def test_calls_of_old_and_new_releases_are_read(
    name: str, release: str, place: tuple[str, int], expected: Any
) -> None:
    call = _read(name, release=release)

    assert (call.model_id, call.seq_id) == place
    assert call.content == expected


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        *(
            ("optim_step", {"adam_params": {field: value}}, rf"adam_params\.{field}.* got {value}")
            for field, value in (
                ("learning_rate", -1.0),
                ("beta1", 1.0),
                ("beta2", -0.5),
                ("eps", -1e-9),
                ("grad_clip_norm", -2.0),
                ("weight_decay", True),
            )
        ),
        ("optim_step", {"adam_params": {"beta1": "a"}}, r"adam_params\.beta1.* got 'a'"),
        ("optim_step", {"adam_params": {"eps": float("inf")}}, r"adam_params\.eps.*got inf"),
        ("optim_step", {"adam_params": {"eps": float("nan")}}, r"adam_params\.eps.*got nan"),
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "'dimuon' is not supported"),
        ("save_weights", {"path": None}, "save_weights, path: .* got None"),
        ("save_weights", {"path": "a/b"}, "name of a checkpoint is 'a/b': '/' is not allowed"),
        ("save_weights", {"path": ".."}, r"name of a checkpoint is '\.\.', expected a word"),
        ("save_weights", {"ttl_seconds": 0}, "save_weights, ttl_seconds: .* got 0"),
        ("save_weights", {"user_metadata": {"a": 1}}, r"user_metadata\.a: .* got 1"),
        ("save_for_sampler", {"path": "x"}, "path is 'x', sampling_session_seq_id 0: expected one"),
        ("save_for_sampler", {"sampling_session_seq_id": None}, "path is None, .*: expected one"),
        ("save_for_sampler", {"path": "x", "sampling_session_seq_id": None}, "named checkpoint"),
        ("save_for_sampler", {"kind": "live"}, "kind: .* got 'live'"),
        ("save_external", {"path": "a/b"}, "name of a checkpoint is 'a/b'"),
        ("save_external", {"ttl_seconds": 0}, "save_weights_external, ttl_seconds: .* got 0"),
        (
            *("save_external", {"age_encryption_recipients": [RECIPIENT, "age1x"]}),
            "age_encryption_recipients, 1: 'age1x' is no public key",
        ),
        ("save_external", {"age_encryption_recipients": [RECIPIENT] * 11}, "recipients: .* 10 "),
        ("load_weights", {"path": "s1"}, "path is 's1', expected tinker://<model id>/<weights "),
        ("load_weights", {"path": "tinker://S:train:0/sampler_weights/a"}, "of save_weights"),
        ("load_weights", {"weights_access_token": "t"}, "weights_access_token is not supported"),
    ],
)
def test_bad_field_is_refused_by_name_and_value(
    name: str, changes: dict[str, Any], message: str
) -> None:
    call = _read(name, **changes)

    assert call.seq_id
    assert isinstance(call.content, Failure)
    assert call.content.category == "user"
    assert re.search(message, call.content.error), call.content.error


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"model_id": ""}, "model_id: .* got ''"), ({"seq_id": 0}, "seq_id: .* got 0")],
)
def test_call_without_model_or_number_is_unreadable(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        _read("optim_step", **changes)
