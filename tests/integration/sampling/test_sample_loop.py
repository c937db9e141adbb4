"""Samples of a queue, of the base model and of snapshots, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager

import numpy as np
import pytest
import redis

from testkit import wait_until
from testkit.training.sampling import ModelFolders, SamplingClient
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.models.byte_model import byte_tokenizer
from turnstream_server.models.sampling_params import (
    SampledSequence,
    SampleResult,
    SamplingParams,
    StopReason,
)
from turnstream_server.operations.keys import sampler_keys, samples_key, session_keys
from turnstream_server.operations.samplers import SampleRequest
from turnstream_server.sampling import service
from turnstream_server.sampling.snapshots import Snapshots

Looping = Callable[..., AbstractContextManager[None]]

PROMPT = [*b"What is 2 + 3?"]
SNAPSHOTS = [None, "one", "two", "whole"]


def require_exact(models: ModelFolders, name: str | None, result: SampleResult) -> None:
    for each in result.sequences:
        ids = [*PROMPT, *each.token_ids.tolist()]
        expected = models.logprobs(name, ids, temperature=0.7)
        np.testing.assert_allclose(each.logprobs, expected[len(PROMPT) :], atol=1e-4)
        assert result.prompt_logprobs is not None
        assert np.isnan(result.prompt_logprobs[0])
        scored = result.prompt_logprobs[1:]
        np.testing.assert_allclose(scored, expected[1 : len(PROMPT)], atol=1e-4)


def test_logprobs_of_all_snapshots_equal_a_forward_pass(
    models: ModelFolders, client: redis.Redis, sessions: SamplingClient, looping: Looping
) -> None:
    params = SamplingParams(
        max_tokens=12, temperature=0.7, seed=3, num_samples=2, stop_ids=(), prompt_logprobs=True
    )
    calls = [(name, PROMPT, params) for name in SNAPSHOTS for _ in range(2)]
    sampled = sessions.submit(*calls)

    with (
        Snapshots(models.base, shared=models.shared) as engine,
        looping(client, sessions.base_model, engine),
    ):
        results = [sessions.result(each) for each in sampled]

    tokens: list[tuple[bytes, ...]] = []
    for (name, _, _), result in zip(calls, results, strict=True):
        require_exact(models, name, result)
        tokens.append(tuple(each.token_ids.tobytes() for each in result.sequences))
    assert tokens[::2] == tokens[1::2]
    assert len({each for pair in tokens for each in pair}) == 2 * len(SNAPSHOTS)
    assert sessions.num_queued() == sessions.num_running() == 0


def test_stop_strings_and_the_rest_of_the_context_end_samples(
    models: ModelFolders, client: redis.Redis, sessions: SamplingClient, looping: Looping
) -> None:
    plain = SamplingParams(max_tokens=60, seed=5, stop_ids=())
    rest = SamplingParams(stop_ids=(), seed=5)
    with (
        Snapshots(models.base, shared=models.shared) as engine,
        looping(client, sessions.base_model, engine),
    ):
        (free,) = sessions.result(sessions.submit(("one", PROMPT, plain))[0]).sequences
        text = str(byte_tokenizer().decode(free.token_ids.tolist()))
        stop = next(text[at : at + 2] for at in range(3, 50) if text[at : at + 2].isascii())
        stopping = SamplingParams(max_tokens=60, seed=5, stop_ids=(), stop_strings=("@@@@", stop))
        long_prompt = PROMPT * 292  # 8 tokens below the context of 4096
        sampled = sessions.submit(("one", PROMPT, stopping), (None, long_prompt, rest))
        (stopped,), (filled,) = (sessions.result(each).sequences for each in sampled)

    assert stopped.stop_reason is StopReason.STOP
    assert stopped.text is not None
    assert stopped.text.endswith(stop)
    assert stopped.token_ids.tolist() == free.token_ids[: len(stopped.token_ids)].tolist()
    assert (filled.stop_reason, len(filled.token_ids)) == (StopReason.LENGTH, 4096 - 14 * 292)


def test_refused_samples_fail_alone_and_name_the_field(
    models: ModelFolders, client: redis.Redis, sessions: SamplingClient, looping: Looping
) -> None:
    good = SamplingParams(max_tokens=3)
    refused = {
        "prompt: token 9999": (None, [1, 9999], good),
        "max_tokens: 14 prompt tokens": ("one", PROMPT, SamplingParams(max_tokens=5000)),
        "stop: 900 is not below": (None, PROMPT, SamplingParams(stop_ids=(900,))),
        "the checkpoint saved/none is gone": ("saved/none", PROMPT, good),
    }
    wrong = sessions.submit(*refused.values())
    unread = wrong[0]._replace(number=99)
    entry = {"r": str(unread), "b": b"\2\0\0\0{}"}
    client.xadd(samples_key(sessions.base_model), entry)  # pyright: ignore[reportArgumentType]
    right = sessions.submit((None, PROMPT, good), ("one", PROMPT, good))

    with (
        Snapshots(models.base, shared=models.shared) as engine,
        looping(client, sessions.base_model, engine),
    ):
        for each in right:
            assert len(sessions.result(each).sequences[0].token_ids) <= 3
        for text, each in zip(refused, wrong, strict=True):
            failure = sessions.failure(each)
            assert failure.error.startswith(text)
            assert failure.category == "user"
        assert sessions.failure(unread).category == "server"
        wait_until(lambda: sessions.num_queued() == 0, describe="an empty queue")


def test_repeated_submit_has_one_sample_and_no_rest_in_the_queue(
    models: ModelFolders, client: redis.Redis, sessions: SamplingClient, looping: Looping
) -> None:
    sampled = sessions.submit((None, PROMPT, SamplingParams(max_tokens=40)), repeat=3)
    started: list[SampleRequest] = []

    class Counting(Snapshots):
        def submit(self, sample: SampleRequest) -> Future[SampleResult]:
            started.append(sample)
            return super().submit(sample)

    with (
        Counting(models.base, shared=models.shared) as engine,
        looping(client, sessions.base_model, engine),
    ):
        sessions.result(sampled[0])
        wait_until(lambda: sessions.num_queued() == 0, describe="an empty queue")

    assert len(started) == 1


class Held:
    """An engine whose samples end when the test ends them."""

    def __init__(self) -> None:
        self.futures: list[Future[SampleResult]] = []

    def submit(self, _: SampleRequest) -> Future[SampleResult]:
        """Return a future that does not end by itself."""
        self.futures.append(Future())
        return self.futures[-1]


def one_token(token: int) -> SampleResult:
    sequence = SampledSequence(
        token_ids=np.array([token], np.int32),
        logprobs=np.array([-1.0], np.float32),
        stop_reason=StopReason.LENGTH,
        version_runs=((0, 1),),
    )
    return SampleResult(sequences=(sequence,))


def test_stopped_loop_finishes_its_running_samples(
    client: redis.Redis, sessions: SamplingClient, looping: Looping
) -> None:
    (sampled,) = sessions.submit((None, PROMPT, SamplingParams()))
    engine = Held()
    with looping(client, sessions.base_model, engine):
        wait_until(lambda: engine.futures, describe="the start of the sample")
        # A read of the queue lasts a second at most: then the loop only waits for the sample.
        threading.Timer(1.5, engine.futures[0].set_result, [one_token(7)]).start()

    assert isinstance(sessions.stored(sampled), SampleResult)


def test_results_of_a_store_outage_are_written_afterwards(
    own_server: EmbeddedServer,
    own_client: redis.Redis,
    looping: Looping,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sessions = SamplingClient(own_client, own_server.url)
    engine = Held()
    with looping(own_client, sessions.base_model, engine):
        (sampled,) = sessions.submit((None, PROMPT, SamplingParams()))
        wait_until(lambda: engine.futures, describe="the start of the sample")
        own_server.kill()
        engine.futures[0].set_result(one_token(7))
        wait_until(lambda: "results of samples" in caplog.text, describe="a failed write")
        own_server.restart()
        (later,) = sessions.submit((None, PROMPT, SamplingParams()))
        wait_until(lambda: len(engine.futures) == 2, describe="the next sample")
        engine.futures[1].set_result(one_token(8))

        results = [sessions.result(each).sequences[0] for each in (sampled, later)]
        assert [each.token_ids.tolist() for each in results] == [[7], [8]]


def test_full_loop_reads_no_more_samples(
    client: redis.Redis, sessions: SamplingClient, looping: Looping
) -> None:
    engine = Held()
    params = SamplingParams(max_tokens=1)
    sampled = sessions.submit(*[(None, PROMPT, params)] * 5)
    with looping(client, sessions.base_model, engine, max_unfinished=2, max_ahead=2):
        wait_until(lambda: len(engine.futures) == 2, describe="two samples")
        assert sessions.num_running() == 2
        for number in range(5):
            wait_until(lambda at=number: len(engine.futures) > at, describe="the next sample")
            assert len(engine.futures) <= number + 2
            engine.futures[number].set_exception(RuntimeError("broken"))
        failures = [sessions.failure(each) for each in sampled]

    assert {each.category for each in failures} == {"server"}


def test_loop_with_a_crowd_of_one_session_reads_on_for_others(
    client: redis.Redis, sessions: SamplingClient, looping: Looping
) -> None:
    engine = Held()
    params = SamplingParams(max_tokens=1)
    sampled = sessions.submit(*[("crowd", PROMPT, params)] * 5, ("other", PROMPT, params))
    with looping(client, sessions.base_model, engine, max_unfinished=2):
        wait_until(lambda: len(engine.futures) == 6, describe="the sample of the other session")
        for future in engine.futures:
            future.set_result(one_token(7))
        for each in sampled:
            sessions.result(each)


def test_unwanted_samples_leave_the_engine_and_are_not_sampled_after_a_restart(
    client: redis.Redis,
    sessions: SamplingClient,
    looping: Looping,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_GRACE_S", 0.0)
    params = SamplingParams(max_tokens=1)
    names = ["cancelled", "finished", "ended", "wanted"]
    sampled = dict(zip(names, sessions.submit(*((n, PROMPT, params) for n in names)), strict=True))
    engine, again = Held(), Held()

    def end(name: str) -> None:
        request_id = sampled[name]
        if name == "cancelled":
            sessions.cancel(sampled[name])
        elif name == "finished":
            session_id = request_id.target.partition(":")[0]
            client.hset(session_keys(session_id).session, "finished", "success")
        else:
            client.hset(sampler_keys(request_id.target).sampler, "ended", "1")

    with looping(client, sessions.base_model, engine):
        wait_until(lambda: len(engine.futures) == 4, describe="the start of the samples")
        for name in names[:2]:
            end(name)
        wait_until(lambda: sessions.num_queued() == 2, describe="the end of two samples")
        assert [each.cancelled() for each in engine.futures] == [True, True, False, False]
        for name in names[:2]:
            assert "was cancelled" in sessions.failure(sampled[name]).error
        engine.futures[2].cancel()
        engine.futures[3].cancel()  # as by an engine that is closed
    end("ended")
    with looping(client, sessions.base_model, again):
        wait_until(lambda: sessions.num_queued() == 1, describe="the end of the ended sample")
        wait_until(lambda: again.futures, describe="the start of the wanted sample")
        again.futures[0].set_result(one_token(7))

    assert len(again.futures) == 1
    assert sessions.stored(sampled["ended"]) is None
    assert isinstance(sessions.stored(sampled["wanted"]), SampleResult)
