"""Client sessions, models and base models in the store, and the keys that remain of them."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import pytest

from testkit.runs.command_logs import BASE, OWNER, CommandLogs
from turnstream.errors import ConflictError, EndOfRunError, RunNotFoundError
from turnstream_server.operations import models
from turnstream_server.operations.contents import CreateModel
from turnstream_server.operations.keys import (
    ALIVE,
    model_keys,
    sampler_keys,
    session_keys,
)
from turnstream_server.operations.models import (
    BaseModel,
    ModelRecord,
    create_model,
    models_of_base,
    read_bases,
    read_model,
    register_base,
)
from turnstream_server.operations.results import Answer
from turnstream_server.operations.samplers import SamplerRecord, write_sampler
from turnstream_server.operations.sessions import (
    Session,
    add_member,
    beat,
    close_silent,
    finish_session,
    open_session,
    read_session,
)

SILENCE_S = 600.0
CONTENT = CreateModel(path=None, optimizer=False)


class Opened(NamedTuple):
    """A session with a model and a sampling session that have results."""

    session_id: str
    model_id: str
    sampler_id: str


@pytest.fixture
def opened(logs: CommandLogs) -> Opened:
    """A session that works."""
    session_id = logs.new_session()
    model_id = logs.new_model(session_id)
    sampler_id = f"{session_id}:sample:0"
    logs.do(lambda client: add_member(client, session_id, sampler_id))
    write_sampler(logs.client, SamplerRecord(sampler_id, BASE, OWNER))
    log = logs.acquire(model_id)
    log.take()
    log.finish({0: Answer({})})
    logs.submit(model_id, 1, "forward_backward")
    logs.client.hset(sampler_keys(sampler_id).samples, "1", "f")
    logs.client.hset(sampler_keys(sampler_id).results, "1", "J{}")
    return Opened(session_id, model_id, sampler_id)


def _be_silent(logs: CommandLogs, session_id: str, *, for_s: float) -> None:
    """Set the newest heartbeat of a session back."""
    logs.client.zincrby(ALIVE, -for_s * 1000, session_id)


def _close_silent(logs: CommandLogs) -> list[str]:
    return logs.do(lambda client: close_silent(client, silence_s=SILENCE_S))


def _silent_for(logs: CommandLogs, session_id: str, *, seconds: float) -> None:
    """Set the time back at which a session was first found silent."""
    key = session_keys(session_id).session
    logs.client.hincrby(key, "silent_ms", -round(seconds * 1000))


def test_session_is_read_back_and_finished_once(logs: CommandLogs) -> None:
    session = Session(
        "a-b", OWNER, tags=["x"], user_metadata={"n": 1}, display_name="d", sdk_version="0.38.0"
    )
    logs.do(lambda client: open_session(client, session))
    assert logs.do(lambda client: read_session(client, "a-b")).require_open() == session

    for reason in ("success", "errored: late"):
        logs.do(lambda client, reason=reason: finish_session(client, "a-b", reason=reason))

    assert logs.do(lambda client: read_session(client, "a-b")).finished == "success"
    with pytest.raises(EndOfRunError, match="'a-b' has ended: success"):
        logs.do(lambda client: beat(client, "a-b"))
    for call in (beat, read_session):
        with pytest.raises(RunNotFoundError, match="no session 'none'"):
            logs.do(lambda client, call=call: call(client, "none"))
    logs.client.zrem(ALIVE, "a-b")


def test_silent_session_is_closed_with_its_results(logs: CommandLogs, opened: Opened) -> None:
    living = logs.new_session()
    _be_silent(logs, opened.session_id, for_s=SILENCE_S + 1)

    assert _close_silent(logs) == []
    _silent_for(logs, opened.session_id, seconds=SILENCE_S / 10)
    assert _close_silent(logs) == [opened.session_id]

    with pytest.raises(EndOfRunError, match="no heartbeat"):
        logs.do(lambda client: beat(client, opened.session_id))
    with pytest.raises(EndOfRunError, match="has ended: its session has ended"):
        logs.submit(opened.model_id, 2)
    with pytest.raises(EndOfRunError, match="has ended"):
        logs.acquire(opened.model_id)
    model = read_model(logs.client, opened.model_id)
    with pytest.raises(EndOfRunError, match="has ended"):
        logs.do(lambda client: create_model(client, model, CONTENT))
    assert model.ended
    assert opened.model_id not in models_of_base(logs.client, BASE)
    assert logs.do(lambda client: read_session(client, living)).finished == ""
    assert _close_silent(logs) == []


def test_closed_session_leaves_only_records(logs: CommandLogs, opened: Opened) -> None:
    log = logs.acquire(opened.model_id)
    _be_silent(logs, opened.session_id, for_s=SILENCE_S + 1)
    _close_silent(logs)
    _silent_for(logs, opened.session_id, seconds=SILENCE_S)
    _close_silent(logs)

    # A worker that has not noticed the end must not write results of a model without a log.
    with pytest.raises(EndOfRunError):
        log.finish({1: Answer({})})

    left: Any = logs.client.keys(f"tm:*{opened.session_id}*")
    assert {key.decode() for key in left} == {
        *session_keys(opened.session_id),
        model_keys(opened.model_id).model,
        sampler_keys(opened.sampler_id).sampler,
    }
    assert logs.client.zscore(ALIVE, opened.session_id) is None


def test_heartbeat_after_an_outage_keeps_a_session(logs: CommandLogs, opened: Opened) -> None:
    # A store that was away for ten minutes returns with silent sessions whose clients all wait.
    _be_silent(logs, opened.session_id, for_s=SILENCE_S + 1)
    assert _close_silent(logs) == []
    _silent_for(logs, opened.session_id, seconds=SILENCE_S)

    logs.do(lambda client: beat(client, opened.session_id))
    assert _close_silent(logs) == []
    _be_silent(logs, opened.session_id, for_s=SILENCE_S + 1)

    assert _close_silent(logs) == []  # the silence begins again


def test_session_that_lost_its_place_is_listed_by_its_heartbeat(logs: CommandLogs) -> None:
    session_id = logs.new_session()
    logs.client.zrem(ALIVE, session_id)

    logs.do(lambda client: beat(client, session_id))

    assert logs.client.zscore(ALIVE, session_id) is not None


def test_session_without_a_record_does_not_block_others(logs: CommandLogs, opened: Opened) -> None:
    logs.client.zadd(ALIVE, {"half": 0})
    _be_silent(logs, opened.session_id, for_s=SILENCE_S + 1)
    assert _close_silent(logs) == ["half"]
    _silent_for(logs, opened.session_id, seconds=SILENCE_S)

    assert _close_silent(logs) == [opened.session_id]

    assert logs.client.exists(session_keys("half").session) == 0


def test_full_store_takes_heartbeats_and_closes_sessions(own_logs: CommandLogs) -> None:
    logs = own_logs
    living, silent = logs.new_session(), logs.new_session()
    model_id = logs.new_model(silent)
    for session_id in (living, silent):
        _be_silent(logs, session_id, for_s=SILENCE_S + 1)
    _close_silent(logs)
    _silent_for(logs, silent, seconds=SILENCE_S)
    logs.client.config_set("maxmemory", 1)

    logs.do(lambda client: beat(client, living))
    register_base(logs.client, BaseModel(BASE, 1, 1, "", 1))

    assert _close_silent(logs) == [silent]
    assert logs.client.exists(model_keys(model_id).bodies) == 0
    logs.client.config_set("maxmemory", 0)


def test_model_is_created_once_by_any_gateway(logs: CommandLogs) -> None:
    session_id = logs.new_session()
    model_id = f"{session_id}:train:0"
    record = ModelRecord(model_id, BASE, OWNER, lora_rank=8, lora_seed=3, user_metadata={"a": 1})

    created = [logs.do(lambda client: create_model(client, record, CONTENT)) for _ in range(2)]

    assert [str(each) for each in created] == [f"{model_id}:0"] * 2
    found = read_model(logs.client, model_id)
    assert found == record._replace(
        created_ms=found.created_ms, last_request_ms=found.last_request_ms
    )
    assert found.created_ms > 0
    assert model_id in models_of_base(logs.client, BASE)


@pytest.mark.parametrize(
    "change", [{"base_model": "other"}, {"lora_rank": 16}, {"user_metadata": {"a": 2}}]
)
def test_model_of_other_settings_is_a_conflict_without_effect(
    logs: CommandLogs, change: dict[str, Any]
) -> None:
    # A conflicting call once listed the model with a base model whose workers cannot run it.
    model_id = logs.new_model()
    record = read_model(logs.client, model_id)

    with pytest.raises(ConflictError, match=f"{model_id}' exists with other settings"):
        logs.do(lambda client: create_model(client, record._replace(**change), CONTENT))

    assert read_model(logs.client, model_id) == record
    assert model_id not in models_of_base(logs.client, "other")


def test_base_models_are_served_until_they_expire(
    logs: CommandLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = BaseModel("b", 64, 300, "", 8), BaseModel("b!", 32, 300, "t", 0)
    for each in (two, one):
        register_base(logs.client, each)
    monkeypatch.setattr(models, "LEASE_S", 0.0)
    register_base(logs.client, BaseModel("gone", 1, 1, "", 1))

    served = read_bases(logs.client)

    assert "gone" not in served
    assert [each for each in served if each in ("b", "b!")] == ["b", "b!"]
    assert (served["b"], served["b!"]) == (one, two)
    assert "gone" in read_bases(logs.client, is_served=False)


def test_two_gateways_close_a_session_at_the_same_time(logs: CommandLogs, opened: Opened) -> None:
    _be_silent(logs, opened.session_id, for_s=SILENCE_S + 1)
    _close_silent(logs)
    _silent_for(logs, opened.session_id, seconds=SILENCE_S)

    async def both(client: Any) -> list[list[str]]:
        calls = [close_silent(client, silence_s=SILENCE_S) for _ in range(2)]
        return await asyncio.gather(*calls)

    assert [opened.session_id] in logs.do(both)
    assert logs.client.exists(model_keys(opened.model_id).results) == 0
