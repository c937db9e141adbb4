"""Turns over HTTP: repeated, missing and changed ones, restarts, replicas and silent clients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import redis

from testkit.gateway_thread import GatewayThread
from testkit.ingest import IngestClient, results_of, turn_fields
from testkit.stores import RunReader
from testkit.turns import turn
from testkit.waiting import wait_until
from turnstream.errors import ConflictError
from turnstream.generator import Publisher
from turnstream.generator.api.trajectory_writers import TrajectoryWriter
from turnstream.store.client import keys
from turnstream.types import TrajectoryKey
from turnstream_server.embedded import EmbeddedServer

_KEY = TrajectoryKey("g", 0)
_FIRST = turn("ab", "CD", logprobs=-0.5)
_SECOND = turn("abcde", "F", logprobs=-0.5)
_SEAL = {"seal": {"reward": 1.0}}


def test_turns_are_stored_in_order_and_sealed(ingest: IngestClient, reader: RunReader) -> None:
    results = [ingest.turn(0, _FIRST), ingest.turn(1, _SECOND, **_SEAL)]

    assert [(each["status"], each["state"], each["next_turn"]) for each in results] == [
        (201, "open", 1),
        (201, "sealed", 2),
    ]
    assert reader.spelled(_KEY) == [("ab", "cd"), ("abcde", "f")]
    assert reader.states() == {"g/0/0": "sealed"}


def test_only_a_failed_start_is_sealed_without_a_turn(
    ingest: IngestClient, reader: RunReader
) -> None:
    whole = {"group_id": "whole", "sample": 0, "num_samples": 1, "turns": []}
    opening = {"group_id": "g", "sample": 0, "num_samples": 1}
    other = {"group_id": "other", "sample": 0, "num_samples": 1}
    ingest.results("groups", {"group_id": "other", "num_samples": 1})
    refused = ingest.results("turns", {**other, "seal": {"status": "completed"}})
    assert refused[0]["status"] == 422
    assert refused[0]["problem"]["detail"].startswith("items.0.turns: there is none; only")
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


@pytest.mark.parametrize("is_sealed", [False, True])
def test_repeated_turn_has_the_same_result(
    ingest: IngestClient, reader: RunReader, is_sealed: bool
) -> None:
    end = _SEAL if is_sealed else {}
    before = [ingest.turn(0, _FIRST), ingest.turn(1, _SECOND, **end)]
    records = reader.records(_KEY)

    again = [ingest.turn(0, _FIRST), ingest.turn(1, _SECOND, **end)]

    assert again == before
    assert reader.records(_KEY) == records
    assert ingest.turn(2, turn("abcdefg", "H"))["status"] == (409 if is_sealed else 201)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_changed_turn_is_a_conflict(
    ingest: IngestClient, reader: RunReader, is_sealed: bool
) -> None:
    ingest.turn(0, _FIRST)
    ingest.turn(1, _SECOND, **(_SEAL if is_sealed else {}))
    records = reader.records(_KEY)

    changed = ingest.turn(0, turn("ab", "CX", logprobs=-0.5))

    assert changed["status"] == 409
    assert changed["problem"]["type"].endswith("/conflict")
    assert "turn 0 of g/0/0 is stored with another content" in changed["problem"]["detail"]
    assert reader.records(_KEY) == records


def test_changed_seal_is_a_conflict(ingest: IngestClient) -> None:
    ingest.turn(0, _FIRST, seal={"reward": 1.0, "tags": {"a": "b"}})

    (changed,) = ingest.results(
        "turns", {"group_id": "g", "sample": 0, "seal": {"reward": 0.5, "tags": {"a": "b"}}}
    )
    (same,) = ingest.results(
        "turns", {"group_id": "g", "sample": 0, "seal": {"reward": 1.0, "tags": {"a": "b"}}}
    )

    assert (changed["status"], same["status"]) == (409, 201)
    assert changed["problem"]["detail"] == "g/0/0 is sealed with another content"


def test_gap_names_the_next_turn(ingest: IngestClient) -> None:
    ingest.turn(0, _FIRST)

    gap = ingest.turn(2, turn("abcdefg", "H"))

    assert (gap["status"], gap["next_turn"]) == (409, 1)
    assert gap["problem"]["type"].endswith("/turn-gap")
    assert "the next turn is turn 1" in gap["problem"]["detail"]
    assert ingest.turn(1, _SECOND)["status"] == 201


def test_turns_of_one_request_follow_each_other(ingest: IngestClient, reader: RunReader) -> None:
    item = {"group_id": "g", "sample": 0, "num_samples": 1}
    items = [
        {**item, "turn": 0, **turn_fields(_FIRST)},
        {**item, "turn": 0, **turn_fields(_FIRST)},  # sent twice
        {**item, "turn": 2, **turn_fields(_SECOND)},  # one is left out
        {**item, "turn": 1, **turn_fields(_SECOND), **_SEAL},
        {**item, "turn": 2, **turn_fields(_SECOND)},  # after the seal
    ]

    results = ingest.results("turns", *items)

    assert [each["status"] for each in results] == [201, 201, 409, 201, 409]
    assert [each["index"] for each in results] == [0, 1, 2, 3, 4]
    assert len(reader.turns(_KEY)) == 2
    assert reader.states() == {"g/0/0": "sealed"}


def test_restarted_gateway_continues_a_trajectory(
    gateway: GatewayThread, ingest: IngestClient, reader: RunReader
) -> None:
    ingest.turn(0, _FIRST)

    gateway.stop()
    gateway.start()
    results = [ingest.turn(0, _FIRST), ingest.turn(1, _SECOND, **_SEAL)]

    assert [each["status"] for each in results] == [201, 201]
    first, second = reader.turns(_KEY)
    assert second.shared_tokens == len(first.token_ids)  # its prompt is not sent again
    assert reader.ledger() == {"g/0/0": "sealed:1"}


def test_two_gateways_write_one_trajectory_in_turn(
    ingest: IngestClient, reader: RunReader, new_gateway: Callable[..., GatewayThread]
) -> None:
    texts = ["ab", "abcd", "abcdef", "abcdefgh", "abcdefghij"]
    sent = [turn(prompt, response) for prompt, response in zip(texts, "CEGIK", strict=True)]
    with IngestClient(new_gateway(), ingest.run) as other:
        clients = [ingest, other, ingest, ingest, other]

        results = [each.turn(n, sent[n]) for n, each in enumerate(clients)]
        stale = ingest.turn(3, sent[3])
        (sealed,) = ingest.results("turns", {"group_id": "g", "sample": 0, **_SEAL})
        (again,) = other.results("turns", {"group_id": "g", "sample": 0, **_SEAL})

    assert [each["status"] for each in [*results, stale, sealed, again]] == [201] * 8
    assert [prompt for prompt, _ in reader.spelled(_KEY)] == texts
    assert reader.ledger() == {"g/0/0": "sealed:1"}


def test_turn_of_another_writer_waits_for_its_lease(
    ingest: IngestClient, gateway: GatewayThread, reader: RunReader
) -> None:
    ingest.turn(0, _FIRST)

    with IngestClient(gateway, ingest.run, writer="other") as other:
        item = {"group_id": "g", "sample": 0, "turn": 1, **turn_fields(_SECOND)}
        response = other.post("turns", item)

    assert response.status_code == 429
    assert int(response.headers["Retry-After"]) >= 1
    assert "being written by test" in response.json()["detail"]
    assert len(reader.turns(_KEY)) == 1


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
    assert ingest.turn(1, _SECOND)["status"] == 201  # stored by now, with the same content


def test_abandoned_trajectory_takes_no_turn(ingest: IngestClient, reader: RunReader) -> None:
    ingest.turn(0, _FIRST)

    ends = [ingest.turn(1, _SECOND, abandon={"reason": "no tools"}) for _ in range(2)]
    after = ingest.turn(2, turn("abcdefg", "H"))

    assert [(each["status"], each["state"]) for each in ends] == [(201, "abandoned")] * 2
    assert reader.ledger() == {"g/0/0": "abandoned:no tools"}
    assert after["status"] == 409
    assert "g/0/0 was abandoned: no tools" in after["problem"]["detail"]


def test_item_without_a_turn_names_the_next_one(
    gateway: GatewayThread, ingest: IngestClient
) -> None:
    ingest.turn(0, _FIRST)
    gateway.stop()
    gateway.start()

    (open_,) = ingest.results("turns", {"group_id": "g", "sample": 0})
    ingest.turn(1, _SECOND, **_SEAL)
    sealed, unknown = ingest.results(
        "turns", {"group_id": "g", "sample": 0}, {"group_id": "other", "sample": 0}
    )

    assert (open_["status"], open_["next_turn"]) == (201, 1)
    assert (sealed["status"], unknown["status"]) == (409, 409)
    assert "already sealed after 2 turns" in sealed["problem"]["detail"]


def test_first_turn_needs_num_samples_unless_the_group_is_open(ingest: IngestClient) -> None:
    item = {"group_id": "g", "sample": 1, "turn": 0, **turn_fields(_FIRST)}

    (before,) = ingest.results("turns", item)
    ingest.results("groups", {"group_id": "g", "num_samples": 2})
    (after,) = ingest.results("turns", item)

    assert before["problem"]["field"] == "items.0.num_samples"
    assert (before["status"], after["status"]) == (422, 201)


def test_silent_client_loses_the_lease_without_abandoning(
    gateway: GatewayThread, client: redis.Redis, new_run: Callable[..., str]
) -> None:
    run = new_run(client, lease_s=0.5)
    leases = keys.run_keys(run).leases
    with IngestClient(gateway, run, writer="talks") as talks, IngestClient(gateway, run) as silent:
        talks.turn(0, _FIRST, group_id="kept")
        silent.turn(0, _FIRST, group_id="lost")

        def is_dropped() -> bool:
            talks.results("turns")  # any request of the writer will do
            now_s, _ = client.time()  # pyright: ignore[reportGeneralTypeIssues]
            return _score(client, leases, "lost/0/0") < now_s * 1000 - 1000

        wait_until(is_dropped, describe="the end of the lease")
        resumed = silent.turn(1, _SECOND, group_id="lost", **_SEAL)

    assert RunReader(client, run).states() == {"kept/0/0": "open", "lost/0/0": "sealed"}
    now_s, _ = client.time()  # pyright: ignore[reportGeneralTypeIssues]
    assert _score(client, leases, "kept/0/0") > now_s * 1000 - 1000
    assert resumed["status"] == 201


def test_trajectory_is_silent_for_itself_without_a_writer_name(
    gateway: GatewayThread, client: redis.Redis, new_run: Callable[..., str]
) -> None:
    run = new_run(client, lease_s=0.5)
    leases = keys.run_keys(run).leases
    with IngestClient(gateway, run, writer=None) as ingest:
        ingest.turn(0, _FIRST, group_id="kept")
        ingest.turn(0, _FIRST, group_id="lost")

        def is_dropped() -> bool:
            ingest.results("turns", {"group_id": "kept", "sample": 0})
            now_s, _ = client.time()  # pyright: ignore[reportGeneralTypeIssues]
            return _score(client, leases, "lost/0/0") < now_s * 1000 - 1000

        wait_until(is_dropped, describe="the end of the lease")

    assert RunReader(client, run).ledger()["kept/0/0"] == "open:1:http-local"


def test_request_of_an_unknown_run_is_404(ingest: IngestClient) -> None:
    ingest.run = "no-such-run"

    responses = [ingest.post("turns", _item(0, _FIRST)), ingest.post("groups")]

    assert [each.status_code for each in responses] == [404, 404]
    assert "no-such-run" in responses[0].json()["detail"]


def test_trajectory_resumes_one_that_has_turns(ingest: IngestClient, reader: RunReader) -> None:
    ingest.turn(0, _FIRST)
    whole = {"group_id": "g", "sample": 0, "num_samples": 1, "reward": 1.0}
    turns = [turn_fields(_FIRST), turn_fields(_SECOND)]

    first = results_of(ingest.post("trajectories", {**whole, "turns": turns}))
    again = results_of(ingest.post("trajectories", {**whole, "turns": turns}))
    other = results_of(ingest.post("trajectories", {**whole, "turns": turns, "reward": 0.0}))
    shorter = results_of(ingest.post("trajectories", {**whole, "turns": turns[:1]}))

    assert first == again
    assert [each[0]["status"] for each in (first, other, shorter)] == [201, 409, 409]
    assert len(reader.turns(_KEY)) == 2


def _item(number: int, sent: object) -> dict[str, object]:
    fields = turn_fields(sent)  # pyright: ignore[reportArgumentType]
    return {"group_id": "g", "sample": 0, "num_samples": 1, "turn": number, **fields}


def _score(client: redis.Redis, name: str, member: str) -> float:
    score = client.zscore(name, member)
    return float(score or 0.0)  # pyright: ignore[reportArgumentType]
