"""Numbered calls of models, samples, and training calls on the batches of a run."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit.services.gateway_thread import GatewayThread
from testkit.training.canned_worker import CannedWorker
from turnstream.batching.config import BatchingConfig
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream.wire import tinker_pb2 as wire
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway import state
from turnstream_server.operations.keys import BASES
from turnstream_server.operations.models import BaseModel


def test_calls_run_by_number_and_are_answered_at_once(api: Any, worker: CannedWorker):
    model = api.model()

    late = api.train(model, 2, token=7).json()
    early = api.train(model, 1, token=5).json()
    results = [api.result(each["request_id"]) for each in (early, late)]

    assert early == {"request_id": f"{model}:1", "model_id": model}
    assert [each["metrics"] for each in results] == [{"loss:sum": 11.0}, {"loss:sum": 15.0}]
    assert worker.ran[-2:] == [f"{model}:1", f"{model}:2"]


def test_refused_training_calls_use_up_their_numbers(api: Any):
    model = api.model()
    cases = [
        ({"loss": "stable_reinforce"}, "'stable_reinforce' is not supported"),
        ({"token": 299}, "datum 0, target_tokens: token 1 is 300, .* has the ids 0 to 299"),
        ({"token": 300}, "datum 0, model_input: token 0 is 300"),
        ({"token": -1}, "datum 0, model_input: token 0 is -1"),
        ({"num_tokens": 129}, "datum 0: model_input has 129 tokens, the context of"),
    ]

    for number, (change, words) in enumerate(cases, 1):
        refused, again = (api.train(model, number, **change).json() for _ in range(2))
        failure = api.result(refused["request_id"])
        assert again == refused
        assert failure["category"] == "user"
        assert re.search(words, failure["error"]), failure["error"]
    after = api.train(model, len(cases) + 1).json()
    assert api.result(after["request_id"])["metrics"] == {"loss:sum": 11.0}


def sparse_call(model: str, number: int, *, num_tokens: int, width: int) -> bytes:
    """Return a body whose targets are zeros, sent as sparse rows without any value."""
    datum = wire.Datum(
        model_input=[wire.Chunk(encoded_text=wire.Tokens(tokens=bytes(4 * num_tokens)))]
    )
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dtype, targets.shape[:] = wire.DTYPE_INT64, (num_tokens, width)
    targets.sparse_csr.crow_indices = bytes(8 * (num_tokens + 1))
    message = wire.ForwardBackwardRequest(
        model_id=model, seq_id=number, data=[datum] * 54, loss_fn="cross_entropy"
    )
    return message.SerializeToString()


def test_dense_values_of_a_key_are_limited_by_width_and_rate(
    api: Any, new_api: Callable[..., Any], gateway: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(state, "DENSE_BYTES_PER_S", 1)
    other = new_api(gateway, key="tml-other")

    def submit(caller: Any, model: str, number: int, *, width: int = 300) -> Any:
        body = sparse_call(model, number, num_tokens=128, width=width)
        headers = {"Content-Type": "application/x-protobuf"}
        return caller.http.post("forward_backward", content=body, headers=headers)

    model = api.model()
    too_wide = submit(api, model, 1, width=301).json()["request_id"]
    accepted, refused = submit(api, model, 2), submit(api, model, 3)
    of_other = submit(other, other.model(), 1)

    words = r"datum 0: target_tokens has the shape \(128, 301\), expected at most 300 targets"
    assert re.search(words, api.result(too_wide)["error"])
    assert [each.status_code for each in (accepted, refused, of_other)] == [200, 429, 200]
    assert int(refused.headers["Retry-After"]) >= 1
    assert "32 MiB/s of dense values" in refused.json()["detail"]


def test_calls_are_accepted_while_gateway_and_worker_were_away(
    base: BaseModel,
    new_gateway: Callable[..., GatewayThread],
    new_api: Callable[..., Any],
    server: EmbeddedServer,
):
    with CannedWorker(server.url, base):
        before = new_api(new_gateway())
        model, sampler = before.model(), before.sampler()
    with connect(server.url) as client:
        stored: Any = client.hget(BASES, base.name)
        away = json.dumps(json.loads(stored) | {"until_s": 0})  # as after 30 s
        client.hset(BASES, base.name, away)
    api = new_api(new_gateway())

    submitted = [api.train(model, 1), api.sample(sampler, 1)]
    named = api.get("get_server_capabilities")["supported_models"]

    assert [each.status_code for each in submitted] == [200, 200]
    assert base.name not in [each["model_name"] for each in named]
    with CannedWorker(server.url, base):
        assert api.result(submitted[0].json()["request_id"])["metrics"] == {"loss:sum": 11.0}


def test_cancelled_samples_fail_and_other_calls_cannot_be_cancelled(api: Any, worker: CannedWorker):
    model, sampler = api.model(), api.sampler()
    done = api.sample(sampler, 1).json()["request_id"]
    api.result(done)
    worker.may_run.clear()
    waiting = api.sample(sampler, 2).json()["request_id"]
    training = api.train(model, 1).json()["request_id"]

    statuses = [api.post("cancel_future", request_id=each) for each in (done, waiting, training)]
    worker.may_run.set()

    assert [each.status_code for each in statuses] == [200, 200, 400]
    assert "cannot be cancelled: calls of a model run in order" in statuses[2].json()["detail"]
    assert api.result(waiting) == {"error": "the sample was cancelled", "category": "user"}
    assert "sequences" in api.result(done)
    assert api.result(training)["metrics"] == {"loss:sum": 11.0}


def test_other_calls_without_effect_use_up_their_numbers(api: Any, worker: CannedWorker):
    model = api.model()
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("optim_step", {"adam_params": {"beta1": 2}}, "adam_params.beta1"),
        ("save_weights", {"path": "a/b"}, "'/' is not allowed"),
        ("save_weights_external", {"age_encryption_recipients": ["a"], "path": "a"}, "'a' is no "),
        ("load_weights", {"path": "tinker://S:train:0/weights/x"}, "there is no checkpoint"),
        ("load_weights", {"path": "tinker://S:train:0/sampler_weights/x"}, "save_weights"),
    ]

    submitted = [
        api.answer(route, model_id=model, seq_id=number, **content)
        for number, (route, content, _) in enumerate(calls, 1)
    ]
    last = api.answer("optim_step", model_id=model, seq_id=len(calls) + 1)

    results = [api.result(each["request_id"]) for each in submitted]
    assert [each["category"] for each in results] == ["user"] * len(calls)
    for (_, _, words), result in zip(calls, results, strict=True):
        assert words in result["error"]
    assert api.result(last["request_id"])["metrics"] == {"learning_rate": 1e-4}
    assert worker.ran[-1] == last["request_id"]


def test_a_checkpoint_of_another_rank_cannot_be_loaded(api: Any):
    session = api.session()
    small = api.model(session)
    large = api.model(session, 1, lora_config={"rank": 16})
    save = api.answer("save_weights", model_id=large, seq_id=1, path="s")["request_id"]
    path = api.result(save)["path"]

    load = {"model_id": small, "seq_id": 1, "path": path, "optimizer": True}
    refused = api.answer("load_weights", **load)["request_id"]

    words = "lora_rank of checkpoint .* is 16, that of the model 8"
    assert re.search(words, api.result(refused)["error"])


def test_a_repeated_number_is_the_same_request(api: Any, worker: CannedWorker):
    model = api.model()
    sampler = api.sampler(model.partition(":")[0])

    first, again = (api.train(model, 1).json() for _ in range(2))
    other = api.train(model, 1, token=6)
    sampled = [api.sample(sampler, 2**62, num_samples=3).json() for _ in range(2)]
    other_sample = api.sample(sampler, 2**62, num_samples=2)

    api.result(first["request_id"])
    assert first == again
    assert worker.ran.count(f"{model}:1") == 1
    assert sampled[0] == sampled[1]
    assert len(set(sampled[0]["sample_sequence_ids"])) == 3
    assert [other.status_code, other_sample.status_code] == [400, 400]
    assert "has come with other content" in other.json()["detail"]


def test_repeated_save_with_another_sampling_session_is_the_same_request(api: Any):
    # The reply to a save was lost. The SDK sends it again with the next number of a session.
    model = api.model()
    save = {"model_id": model, "seq_id": 1, "kind": "snapshot"}

    first, again = (
        api.answer("save_weights_for_sampler", sampling_session_seq_id=number, **save)
        for number in (5, 6)
    )
    named = api.post("save_weights_for_sampler", model_id=model, seq_id=1, path="a")

    assert again == first
    session = model.partition(":")[0]
    assert api.result(first["request_id"])["sampling_session_id"] == f"{session}:sample:5"
    assert named.status_code == 400


def test_numbers_that_no_client_sends_are_refused(api: Any):
    model = api.model()
    for number in (0, -1, "1", 10**6, 2**31, 10**30):
        assert api.train(model, number).status_code == 400, number


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 127}, "prompt has 2 tokens and max_tokens is 127: the context"),
        ({"tokens": (5, 300)}, "prompt: token 1 is 300"),
        ({"tokens": (1,) * 128, "max_tokens": None}, "prompt has 128 tokens"),
        (
            {"num_samples": 4096, "max_tokens": None, "topk_sample_logprobs": 8},
            "4644866 values, expected at most 4194304: num_samples 4096 x max_tokens 126",
        ),
    ],
)
def test_samples_that_cannot_be_drawn_fail(api: Any, params: dict[str, Any], words: str):
    sampler = api.sampler()

    submitted = api.sample(sampler, 7, **{"num_samples": 2, **params}).json()

    result = api.result(submitted["request_id"])
    assert len(submitted["sample_sequence_ids"]) == params.get("num_samples", 2)
    assert result["category"] == "user"
    assert words in result["error"]


def test_samples_are_drawn_from_a_prompt_of_several_chunks(api: Any):
    sampler = api.sampler()
    chunks = [{"tokens": [1, 2]}, {"tokens": []}, {"tokens": [9]}]
    content = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": chunks}}

    request_id = api.answer("asample", **content, sampling_params={"max_tokens": 1})["request_id"]

    assert api.result(request_id)["sequences"] == [
        {"stop_reason": "length", "tokens": [9], "logprobs": [-1.0]}
    ]


def test_big_bodies_are_decoded_while_others_are_answered(api: Any):
    model = api.model()
    tokens = [1] * 100
    datum = {
        "model_input": {"chunks": [{"tokens": tokens}]},
        "loss_fn_inputs": {"target_tokens": {"data": tokens, "dtype": "int64"}},
    }
    sent = {"data": [datum] * 3_000, "loss_fn": "cross_entropy"}
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(
            api.answer("forward", model_id=model, seq_id=1, forward_input=sent)
        )
    )

    thread.start()
    beats = 0
    while thread.is_alive():
        api.get("healthz")
        beats += 1
    thread.join()

    assert beats > 1
    result = api.result(answers[0]["request_id"])
    assert result["metrics"] == {"loss:sum": 300_000.0}


# ------------------------------------------------------------------------------ runs


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
