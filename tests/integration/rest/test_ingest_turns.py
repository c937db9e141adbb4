"""Turns over HTTP: repeated, missing and changed ones, restarts, replicas and silent clients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis

from testkit.requests.ingest import IngestClient, turn_fields
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from testkit.turns import turn
from testkit.waiting import wait_until
from turnstream.errors import ConflictError
from turnstream.generator import Publisher
from turnstream.generator.api.trajectory_writers import TrajectoryWriter
from turnstream.store.client import keys
from turnstream.types import TrajectoryKey, Turn
from turnstream_server.embedded import EmbeddedServer

_KEY = TrajectoryKey("g", 0)
_NAMED = {"group_id": "g", "sample": 0}
_FIRST = turn("ab", "CD", logprobs=-0.5)
_SECOND = turn("abcde", "F", logprobs=-0.5)
_SEAL = {"seal": {"reward": 1.0}}


def test_only_a_failed_start_is_sealed_without_a_turn(
    ingest: IngestClient, reader: RunReader
) -> None:
    opening = {**_NAMED, "num_samples": 1}
    whole = {**opening, "group_id": "whole", "turns": []}
    ingest.results("groups", {"group_id": "other", "num_samples": 1})
    completed = {**opening, "group_id": "other", "seal": {"status": "completed"}}
    (refused,) = ingest.results("turns", completed)
    assert refused["status"] == 422
    assert refused["problem"]["detail"].startswith("items.0.turns: there is none; only")
    response = ingest.post("trajectories", whole)
    assert (response.status_code, response.json()["field"]) == (422, "items.0.turns")

    seal = {"status": "error", "tags": {"why": "no sandbox"}}
    for _ in range(2):
        of_turns = ingest.results("turns", {**opening, "seal": seal})
        of_trajectories = ingest.results("trajectories", {**whole, **seal})
        assert [each["status"] for each in (*of_turns, *of_trajectories)] == [201, 201]
    changed = ingest.results("turns", {**opening, "seal": {"status": "error"}})

    assert changed[0]["status"] == 409
    assert reader.sealed() == [_KEY, TrajectoryKey("whole", 0)]
    assert reader.turns(_KEY) == []


@pytest.mark.parametrize("state", ["open", "sealed"])
def test_repeated_missing_and_changed_turns_change_nothing(
    ingest: IngestClient, reader: RunReader, state: str
) -> None:
    end, after = _SEAL if state == "sealed" else {}, turn("abcdefg", "H")
    before, gap = [ingest.turn(0, _FIRST)], ingest.turn(2, after)
    before += [ingest.turn(1, _SECOND, **end)]
    records = reader.records(_KEY)

    again = [ingest.turn(0, _FIRST), ingest.turn(1, _SECOND, **end)]
    changed = ingest.turn(0, turn("ab", "CX", logprobs=-0.5))

    found = [(each["status"], each["state"], each["next_turn"]) for each in before]
    assert found == [(201, "open", 1), (201, state, 2)]
    assert again == before
    assert (gap["status"], gap["next_turn"], changed["status"]) == (409, 1, 409)
    assert gap["problem"]["type"].endswith("/turn-gap")
    assert "the next turn is turn 1" in gap["problem"]["detail"]
    assert changed["problem"]["type"].endswith("/conflict")
    assert "turn 0 of g/0/0 is stored with another content" in changed["problem"]["detail"]
    assert reader.records(_KEY) == records
    assert reader.spelled(_KEY) == [("ab", "cd"), ("abcde", "f")]
    assert reader.states() == {"g/0/0": state}
    assert ingest.turn(2, after)["status"] == (201 if state == "open" else 409)


@pytest.mark.parametrize("state", ["open", "sealed"])
def test_call_is_stored_once_whatever_its_index(
    ingest: IngestClient,
    reader: RunReader,
    new_gateway: Callable[..., GatewayThread],
    state: str,
) -> None:
    end = _SEAL if state == "sealed" else {}
    first, second = (
        replace(one, call_id=one.prompt_ids.tobytes().hex()) for one in (_FIRST, _SECOND)
    )
    ingest.turn(0, first)
    ingest.turn(1, second, **end)
    records = reader.records(_KEY)

    with IngestClient(new_gateway(), ingest.run) as other:
        for client in (ingest, other):
            again = [client.turn(index, first) for index in (0, 1, 2, 7)]
            again.append(client.turn(5, second, **end))
            changed = client.turn(2, replace(turn("ab", "X"), call_id=first.call_id))
            gap = client.turn(7, replace(_SECOND, call_id="new"))

            assert [each["status"] for each in again] == [201] * 5
            assert (changed["status"], gap["status"]) == (409, 409)
            assert f"has the call_id '{first.call_id}', with" in changed["problem"]["detail"]
        assert reader.records(_KEY) == records
        after = other.turn(2, turn("abcdefg", "H"))
    assert after["status"] == (201 if state == "open" else 409)


def test_changed_seal_is_a_conflict(ingest: IngestClient) -> None:
    seals = [{"reward": reward, "tags": {"a": "b"}} for reward in (1.0, 0.5)]
    ingest.turn(0, _FIRST, seal=seals[0])

    same, changed = (ingest.results("turns", {**_NAMED, "seal": each})[0] for each in seals)

    assert (same["status"], changed["status"]) == (201, 409)
    assert changed["problem"]["detail"] == "g/0/0 is sealed with another content"


def test_turns_of_one_request_follow_each_other(ingest: IngestClient, reader: RunReader) -> None:
    first, second = _item(0, _FIRST), _item(1, _SECOND, **_SEAL)
    # One is sent twice, one is left out, and one comes after the seal.
    items = [first, first, {**second, "turn": 2}, second, {**first, "turn": 2}]

    results = ingest.results("turns", *items)

    assert [each["status"] for each in results] == [201, 201, 409, 201, 409]
    assert [each["index"] for each in results] == [0, 1, 2, 3, 4]
    assert len(reader.turns(_KEY)) == 2
    assert reader.states() == {"g/0/0": "sealed"}


def test_two_gateways_write_one_trajectory_in_turn(
    ingest: IngestClient, reader: RunReader, new_gateway: Callable[..., GatewayThread]
) -> None:
    texts = ["ab", "abcd", "abcdef", "abcdefgh", "abcdefghij"]
    sent = [turn(prompt, response) for prompt, response in zip(texts, "CEGIK", strict=True)]
    with IngestClient(new_gateway(), ingest.run) as other:
        clients = [ingest, other, ingest, ingest, other]

        results = [each.turn(n, sent[n]) for n, each in enumerate(clients)]
        stale = ingest.turn(3, sent[3])
        sealed, again = (each.results("turns", {**_NAMED, **_SEAL})[0] for each in (ingest, other))

    assert [each["status"] for each in [*results, stale, sealed, again]] == [201] * 8
    assert [prompt for prompt, _ in reader.spelled(_KEY)] == texts
    assert reader.ledger() == {"g/0/0": "sealed:1"}


def test_writer_that_lost_its_lease_is_refused(
    server: EmbeddedServer, client: redis.Redis, ingest: IngestClient
) -> None:
    ingest.turn(0, _FIRST)
    names = keys.run_keys(ingest.run)

    def adopt() -> TrajectoryWriter | None:
        client.zadd(names.leases, {"g/0/0": 1})  # it lapses, until the gateway renews it
        with contextlib.suppress(ConflictError):
            return publisher.adopt("g", 0)
        return None

    with Publisher(server.url, ingest.run, writer="sdk") as publisher:
        adopted = wait_until(adopt)
        assert adopted is not None
        response = ingest.post("turns", _item(1, _SECOND))
        adopted.append(_SECOND.prompt_ids, _SECOND.response_ids, logprobs=_SECOND.logprobs)
        adopted.seal(reward=1.0)

    assert response.status_code == 429  # it may come back when the lease of the other one ends
    assert int(response.headers["Retry-After"]) >= 1
    assert "being written by sdk" in response.json()["detail"]
    assert ingest.turn(1, _SECOND)["status"] == 201  # stored by now, with the same content


def test_abandoned_trajectory_takes_no_turn(ingest: IngestClient, reader: RunReader) -> None:
    ingest.turn(0, _FIRST)

    ends = [ingest.turn(1, _SECOND, abandon={"reason": "no tools"}) for _ in range(2)]
    after = ingest.turn(2, turn("abcdefg", "H"))

    assert [(each["status"], each["state"]) for each in ends] == [(201, "abandoned")] * 2
    assert reader.ledger() == {"g/0/0": "abandoned:no tools"}
    assert after["status"] == 409
    assert "g/0/0 was abandoned: no tools" in after["problem"]["detail"]


def test_item_without_a_turn_names_the_next_one_to_a_restarted_gateway(
    gateway: GatewayThread, ingest: IngestClient, reader: RunReader
) -> None:
    ingest.turn(0, _FIRST)
    gateway.stop()
    gateway.start()

    (open_,) = ingest.results("turns", _NAMED)
    ingest.turn(1, _SECOND, **_SEAL)
    sealed, unknown = ingest.results("turns", _NAMED, {**_NAMED, "group_id": "other"})

    assert (open_["status"], open_["next_turn"]) == (201, 1)
    assert (sealed["status"], unknown["status"]) == (409, 409)
    assert "already sealed after 2 turns" in sealed["problem"]["detail"]
    first, second = reader.turns(_KEY)
    assert second.shared_tokens == len(first.token_ids)  # its prompt is not sent again


def test_first_turn_needs_num_samples_unless_the_group_is_open(ingest: IngestClient) -> None:
    item = {"group_id": "g", "sample": 1, "turn": 0, **turn_fields(_FIRST)}

    (before,) = ingest.results("turns", item)
    ingest.results("groups", {"group_id": "g", "num_samples": 2})
    (after,) = ingest.results("turns", item)

    assert before["problem"]["field"] == "items.0.num_samples"
    assert (before["status"], after["status"]) == (422, 201)


@pytest.mark.parametrize("has_name", [True, False])
def test_silent_client_loses_the_lease_without_abandoning(
    gateway: GatewayThread, client: redis.Redis, new_run: Callable[..., str], has_name: bool
) -> None:
    """Without a name of its writer, each trajectory is a client of its own."""
    run = new_run(client, lease_s=0.5)
    names = ("talks", "test") if has_name else (None, None)

    def is_lapsed(name: str) -> bool:
        talks.results("turns", *([] if has_name else [{**_NAMED, "group_id": "kept"}]))
        now_s, _ = client.time()  # pyright: ignore[reportGeneralTypeIssues]
        score: Any = client.zscore(keys.run_keys(run).leases, f"{name}/0/0")
        return score < now_s * 1000 - 1000

    with (
        IngestClient(gateway, run, writer=names[0]) as talks,
        IngestClient(gateway, run, writer=names[1]) as silent,
    ):
        talks.turn(0, _FIRST, group_id="kept")
        silent.turn(0, _FIRST, group_id="lost")
        wait_until(lambda: is_lapsed("lost"), describe="the end of the lease")
        assert not is_lapsed("kept")
        resumed = silent.turn(1, _SECOND, group_id="lost", **_SEAL)

    kept = f"open:1:{'talks' if has_name else 'http-local'}"
    assert RunReader(client, run).ledger()["kept/0/0"] == kept
    assert RunReader(client, run).states() == {"kept/0/0": "open", "lost/0/0": "sealed"}
    assert resumed["status"] == 201


def test_request_of_an_unknown_run_is_404(ingest: IngestClient) -> None:
    ingest.run = "no-such-run"

    responses = [ingest.post("turns", _item(0, _FIRST)), ingest.post("groups")]

    assert [each.status_code for each in responses] == [404, 404]
    assert "no-such-run" in responses[0].json()["detail"]


def test_trajectory_resumes_one_that_has_turns(ingest: IngestClient, reader: RunReader) -> None:
    ingest.turn(0, _FIRST)
    whole = {**_NAMED, "num_samples": 1, "reward": 1.0}
    turns = [turn_fields(_FIRST), turn_fields(_SECOND)]

    def sent(**fields: Any) -> list[dict[str, Any]]:
        return ingest.results("trajectories", {**whole, "turns": turns, **fields})

    first, again, other, shorter = sent(), sent(), sent(reward=0.0), sent(turns=turns[:1])

    assert first == again
    assert [each[0]["status"] for each in (first, other, shorter)] == [201, 409, 409]
    assert len(reader.turns(_KEY)) == 2


def _item(number: int, sent: Turn, **fields: Any) -> dict[str, Any]:
    return {**_NAMED, "num_samples": 1, "turn": number, **turn_fields(sent), **fields}
