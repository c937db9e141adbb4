"""Samples in the store: submitted once, read by samplers, finished once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from testkit import assert_same
from testkit.runs.command_logs import OWNER, CommandLogs
from turnstream.errors import ConflictError, EndOfRunError, RunNotFoundError, StoreFullError
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.models.sampling_params import SamplingParams
from turnstream_server.operations import samplers
from turnstream_server.operations.keys import RequestId, sampler_keys, samples_key
from turnstream_server.operations.results import Answer, Failure, decode_result
from turnstream_server.operations.samplers import (
    SampleQueue,
    SampleRequest,
    SamplerRecord,
    read_sampler,
    refuse_sample,
    submit_sample,
    write_sampler,
    write_sampler_async,
)

PROMPT = np.array([5, 6, 7], np.int32)
LARGE = 2**63 - 1


@pytest.fixture
def sampler(logs: CommandLogs, request: pytest.FixtureRequest) -> SamplerRecord:
    """A sampling session of a base model of its own."""
    return _new_sampler(logs, base_model=f"tiny/{request.node.name}")


def _new_sampler(logs: CommandLogs, *, base_model: str) -> SamplerRecord:
    sampler_id = f"{logs.new_session()}:sample:0"
    record = SamplerRecord(sampler_id, base_model, OWNER, folder="saved/x")
    write_sampler(logs.client, record)
    return record


def _submit(logs: CommandLogs, sampler: SamplerRecord, number: int, **params: Any) -> RequestId:
    params_of_call = SamplingParams(**params)
    return logs.do(lambda client: submit_sample(client, sampler, number, PROMPT, params_of_call))


def _queue(logs: CommandLogs, sampler: SamplerRecord, name: str = "s0") -> SampleQueue:
    return SampleQueue(logs.client, sampler.base_model, sampler=name)


def _numbers(samples: Iterator[SampleRequest]) -> list[int]:
    return [each.request_id.number for each in samples]


def test_sampler_is_read_back_and_its_weights_are_replaced(
    logs: CommandLogs, sampler: SamplerRecord
) -> None:
    newer = sampler._replace(folder="saved/y", model_path="tinker://S:train:0/weights/a")

    assert logs.do(lambda client: read_sampler(client, sampler.sampler_id)) == sampler
    logs.do(lambda client: write_sampler_async(client, newer))

    assert logs.do(lambda client: read_sampler(client, sampler.sampler_id)) == newer
    with pytest.raises(RunNotFoundError, match="no sampling session 'S:sample:9'"):
        logs.do(lambda client: read_sampler(client, "S:sample:9"))


def test_sample_is_read_as_it_was_submitted(logs: CommandLogs, sampler: SamplerRecord) -> None:
    params = {"max_tokens": 3, "stop_ids": (1, 2), "stop_strings": ("a",), "seed": -(2**63)}
    request_id = _submit(logs, sampler, LARGE, **params)

    (sample,) = _queue(logs, sampler).read()

    assert request_id == sample.request_id == RequestId(sampler.sampler_id, LARGE)
    assert str(sample.folder) == "saved/x"
    assert sample.params == SamplingParams(**params)
    assert_same(sample.prompt, PROMPT)


def test_large_numbers_are_not_rounded(logs: CommandLogs, sampler: SamplerRecord) -> None:
    queue = _queue(logs, sampler)
    for number in (LARGE, LARGE - 1, 2**53, 2**53 + 1):
        _submit(logs, sampler, number)

    for sample in queue.read():
        queue.finish(sample, Answer({"n": sample.request_id.number}))

    keys = sampler_keys(sampler.sampler_id)
    submitted: Any = logs.client.hkeys(keys.samples)
    assert {int(number) for number in submitted} == {LARGE, LARGE - 1, 2**53, 2**53 + 1}
    stored: Any = logs.client.hgetall(keys.results)
    assert {int(number): decode_result(data) for number, data in stored.items()} == {
        number: Answer({"n": number}) for number in (LARGE, LARGE - 1, 2**53, 2**53 + 1)
    }


def test_repeated_sample_has_one_result_and_the_same_id(
    logs: CommandLogs, sampler: SamplerRecord
) -> None:
    queue, refusal = _queue(logs, sampler), Failure("too long", "user")
    ids = {str(_submit(logs, sampler, 7)) for _ in range(2)}
    with pytest.raises(ConflictError, match="seq_id 7"):
        _submit(logs, sampler, 7, seed=1)
    for _ in range(2):  # it is not queued
        request_id = logs.do(lambda client: refuse_sample(client, sampler.sampler_id, 3, refusal))
        assert request_id == RequestId(sampler.sampler_id, 3)

    samples = [*queue.read()]
    for place, sample in enumerate(samples):
        queue.finish(sample, Answer({"place": place}))

    assert ids == {f"{sampler.sampler_id}:7"}
    assert [each.request_id.number for each in samples] == [7, 7]
    assert _result(logs, sampler, 7) == Answer({"place": 0})
    assert _result(logs, sampler, 3) == refusal
    assert str(_submit(logs, sampler, 7)) in ids
    assert [*queue.read(block=False)] == []  # finished: not queued again
    assert logs.client.xlen(samples_key(sampler.base_model)) == 0


def _result(logs: CommandLogs, sampler: SamplerRecord, number: int) -> Any:
    stored: Any = logs.client.hget(sampler_keys(sampler.sampler_id).results, str(number))
    return None if stored is None else decode_result(stored)


@pytest.mark.both_servers
def test_unfinished_samples_are_all_read_again_after_a_restart(
    logs: CommandLogs, sampler: SamplerRecord
) -> None:
    for number in range(5):
        _submit(logs, sampler, number)
    before = _queue(logs, sampler)
    first, *_ = [*before.read()]
    before.finish(first, Answer({}))
    _submit(logs, sampler, 5)

    restarted = _queue(logs, sampler)

    found = [_numbers(restarted.read(count=2, block=False)) for _ in range(4)]
    assert found == [[1, 2], [3, 4], [5], []]


def test_abandoned_samples_are_taken_over_in_parts(
    logs: CommandLogs, sampler: SamplerRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        _submit(logs, sampler, number)
    gone = _queue(logs, sampler, "gone")
    samples = [*gone.read(count=100)]
    other = _queue(logs, sampler, "other")
    assert [*other.take_over()] == []

    monkeypatch.setattr(samplers, "_ABANDONED_MS", 0)
    gone.renew(samples[:1])
    taken = [*_numbers(other.take_over()), *_numbers(other.take_over())]

    assert sorted(taken) == list(range(100))
    other.finish(samples[0], Answer({"by": "other"}))
    gone.finish(samples[0], Answer({"by": "gone"}))
    assert _result(logs, sampler, 0) == Answer({"by": "other"})


def test_samples_survive_a_restart_and_the_loss_of_the_store(
    own_logs: CommandLogs, own_server: EmbeddedServer
) -> None:
    logs = own_logs
    sampler = _new_sampler(logs, base_model="tiny")
    queue = _queue(logs, sampler)
    _submit(logs, sampler, 1)
    assert _numbers(queue.read()) == [1]

    own_server.kill()
    own_server.restart()
    _submit(logs, sampler, 2)
    assert _numbers(queue.read()) == [2]
    assert _numbers(_queue(logs, sampler).read()) == [1, 2]

    logs.client.flushall()
    assert [*queue.take_over()] == []
    sampler = _new_sampler(logs, base_model="tiny")
    _submit(logs, sampler, 3)
    assert _numbers(queue.read()) == [3]


def test_sample_of_a_closed_session_writes_no_result(
    logs: CommandLogs, sampler: SamplerRecord
) -> None:
    _submit(logs, sampler, 1)
    keys, queue = sampler_keys(sampler.sampler_id), _queue(logs, sampler)
    logs.client.hset(keys.sampler, "ended", "1")
    logs.client.delete(keys.samples)

    for sample in queue.read():
        queue.finish(sample, Answer({}))

    assert logs.client.exists(keys.results) == 0
    assert logs.client.xlen(samples_key(sampler.base_model)) == 0
    with pytest.raises(EndOfRunError):
        _submit(logs, sampler, 1)
    with pytest.raises(RunNotFoundError):
        _submit(logs, sampler._replace(sampler_id="S:sample:9"), 1)


def test_closed_queue_leaves_its_group_unless_it_has_samples(
    logs: CommandLogs, sampler: SamplerRecord
) -> None:
    for number in range(2):
        _submit(logs, sampler, number)
    with contextlib.closing(_queue(logs, sampler, "busy")) as busy:
        assert len([*busy.read(count=1)]) == 1
    with contextlib.closing(_queue(logs, sampler, "idle")) as idle:
        for sample in idle.read():
            idle.finish(sample, Answer({}))

    consumers: Any = logs.client.xinfo_consumers(samples_key(sampler.base_model), "samplers")
    assert [each["name"] for each in consumers] == [b"busy"]
    assert _numbers(_queue(logs, sampler, "busy").read()) == [0]


def test_full_store_lets_samplers_finish(own_logs: CommandLogs) -> None:
    logs = own_logs
    sampler = _new_sampler(logs, base_model="tiny")
    queue = _queue(logs, sampler)
    _submit(logs, sampler, 1)
    samples = [*queue.read()]
    logs.client.config_set("maxmemory", 1)

    with pytest.raises(StoreFullError):
        _submit(logs, sampler, 2)
    for sample in samples:
        queue.finish(sample, Answer({}))

    assert _result(logs, sampler, 1) == Answer({})
    assert logs.client.xlen(samples_key("tiny")) == 0
    logs.client.config_set("maxmemory", 0)
