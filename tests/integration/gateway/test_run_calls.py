"""Training calls on the batches of a run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import redis

from testkit.canned_worker import CannedWorker
from turnstream.batching.config import BatchingConfig
from turnstream.store.run.runs import create_run

_numbers = itertools.count(1)


@pytest.fixture
def run(client: redis.Redis) -> str:
    name = f"of-calls-{next(_numbers)}"
    create_run(client, name, BatchingConfig(batch_groups=2, mini_batch_groups=2))
    return name


def sdk_call(settings: dict[str, Any], *, loss: str = "ppo", datums: int = 1) -> dict[str, Any]:
    """Return the input of a call with placeholders and these settings."""
    placeholder = {
        "model_input": {"chunks": [{"tokens": [0]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [0], "dtype": "int64"}},
    }
    return {"data": [placeholder] * datums, "loss_fn": loss, "loss_fn_config": settings}


def test_call_on_a_run_has_a_native_route_and_a_form_for_the_sdk(
    api: Any, worker: CannedWorker, run: str
):
    model, settings = api.model(), {"clip_low_threshold": 0.9}
    numbered = {"model_id": model, "loss_fn": "ppo", "loss_fn_config": settings, "run": run}
    sent = {"model_id": model, "forward_backward_input": sdk_call({"run": run, **settings})}

    native = api.answer("forward_backward_run", seq_id=1, **numbered)
    of_sdk = api.answer("forward_backward", seq_id=2, **sent)
    repeated = api.answer("forward_backward", seq_id=2, **sent)

    results = [api.result(each["request_id"]) for each in (native, of_sdk)]
    assert results == [{"run": run, "loss_fn": "ppo", "settings": settings}] * 2
    assert repeated == of_sdk
    assert worker.ran[-2:] == [f"{model}:1", f"{model}:2"]


REFUSED = [
    (sdk_call({"run": "no-run"}), "no run named 'no-run'"),
    (sdk_call({"run": "RUN"}, loss="cispo"), "loss_fn 'cispo' is not supported on a run"),
    (sdk_call({"run": "RUN", "beta": 1.0}), "loss_fn_config has 'beta'; ppo on a run has: run"),
    (sdk_call({"run": "RUN", "clip_low_threshold": 1.1}), "is 1.1, expected 0 to 1"),
    (sdk_call({"run": "RUN", "clip_high_threshold": "2"}), "is '2', expected 1 or more"),
    (sdk_call({"run": "RUN"}, datums=2), "2 datums of 2 tokens, expected one datum of one"),
    (sdk_call({"run": ""}), "run is empty"),
    (sdk_call({"run": 1.0}), "setting 'run' is unknown"),
]


def test_call_on_a_run_that_cannot_be_trained_is_refused(api: Any, run: str):
    model = api.model()
    for number, (sent, words) in enumerate(REFUSED, 1):
        named = sent["loss_fn_config"]["run"]
        settings = sent["loss_fn_config"] | {"run": run if named == "RUN" else named}
        content = {"forward_backward_input": sent | {"loss_fn_config": settings}}
        submitted = api.answer("forward_backward", model_id=model, seq_id=number, **content)

        failure = api.result(submitted["request_id"])
        assert failure["category"] == "user"
        assert words in failure["error"]
    after = api.answer("forward_backward_run", model_id=model, seq_id=len(REFUSED) + 1, run=run)
    assert api.result(after["request_id"])["run"] == run


def test_native_call_with_an_unknown_field_or_a_forward_is_refused(api: Any, run: str):
    model = api.model()

    forward = api.answer("forward", model_id=model, seq_id=1, forward_input=sdk_call({"run": run}))
    misspelt = api.answer("forward_backward_run", model_id=model, seq_id=2, run=run, loss="ppo")

    failures = [api.result(each["request_id"])["error"] for each in (forward, misspelt)]
    assert failures[0].startswith(f"forward on run {run!r} is not supported")
    assert failures[1].startswith("forward_backward_run, loss: extra inputs are not permitted")


def test_repeated_call_keeps_its_refusal_after_the_run_was_created(api: Any, client: redis.Redis):
    model, name = api.model(), f"of-calls-{next(_numbers)}"
    sent = {"model_id": model, "seq_id": 1, "run": name}

    first = api.answer("forward_backward_run", **sent)
    create_run(client, name, BatchingConfig(batch_groups=2, mini_batch_groups=2))
    again = api.answer("forward_backward_run", **sent)

    assert again == first
    assert f"no run named {name!r}" in api.result(again["request_id"])["error"]
