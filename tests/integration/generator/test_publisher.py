from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from testkit import group, ids, trajectory, turn
from testkit.services.stores import RunReader, Store
from testkit.waiting import entered, finish, wait_until_async
from turnstream.errors import ConflictError, InvalidTurnError, RejectedError
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.store.client.connection import connect
from turnstream.types import GroupOpened, SealedTrajectory, Status, TrajectoryKey
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis


def test_trajectory_is_stored_with_its_turns_and_seal(store: Store) -> None:
    run = store.new_run()

    with (
        Publisher(store.url, run, writer="w") as publisher,
        publisher.trajectory("g", 0, num_samples=1, prompt_uid="p") as episode,
    ):
        episode.append([1, 2, 3], [4, 5], logprobs=[-0.5, -0.25], policy_version=7)
        episode.append([1, 2, 3, 4, 5, 6], [7], logprobs=[-1.0], policy_version=8)
        episode.seal(reward=0.5, tags={"env": "guess"}, metrics={"n": 2}, sampling={"t": 1})

    stored = store.read(run)
    opened, seal = stored.events()
    assert opened == GroupOpened(group_id="g", prompt_uid="p", num_samples=1)
    assert [t.token_ids.tolist() for t in stored.turns(seal.key)] == [[1, 2, 3, 4, 5], [6, 7]]
    assert [(s.parent_turn, s.shared_tokens) for s in seal.turns] == [(-1, 0), (0, 5)]
    assert (seal.reward, seal.status, seal.lease_epoch) == (0.5, Status.COMPLETED, 1)
    assert (seal.oldest_version, seal.newest_version, seal.has_logprobs) == (7, 8, True)
    assert (seal.tags, seal.metrics, seal.sampling) == ({"env": "guess"}, {"n": 2.0}, {"t": 1.0})
    assert stored.counts() == {"accepted": 1, "sealed": 1}


def test_alternating_branches_send_only_what_is_new(store: Store) -> None:
    run = store.new_run()
    agent, helper = "the agent's long context " * 40, "the helper's own context " * 40
    turns = [
        turn(agent, "AB"),
        turn(helper, "CD"),
        turn(agent + "abx", "EF"),
        turn(helper + "cdy", "GH"),
        turn(agent + "abxefz", "IJ"),
    ]

    with Publisher(store.url, run) as publisher:
        publisher.publish(group("g", trajectory(*turns))).result(10)
        statistics = publisher.statistics()

    stored = store.read(run).turns(TrajectoryKey("g", 0))
    new_tokens = [len(agent) + 2, len(helper) + 2 - 4, 3, 3, 3]  # both contexts begin with "the "
    assert [s.parent_turn for s in stored] == [-1, 0, 0, 1, 2]
    assert [len(s.token_ids) for s in stored] == new_tokens
    full_tokens = sum(len(t.prompt_ids) + len(t.response_ids) for t in turns)
    assert 4 * sum(new_tokens) < statistics.wire_bytes < 4 * sum(new_tokens) + 60 * len(turns)
    assert statistics.resend_bytes - statistics.wire_bytes == 4 * (full_tokens - sum(new_tokens))
    assert statistics.turn_tokens == full_tokens
    assert statistics.merged_tokens == len(agent) + len(helper) + 8 + 5


def test_parallel_agents_share_one_numbering(store: Store) -> None:
    run = store.new_run()
    prompts = [chr(97 + agent) * (50 + agent) for agent in range(8)]

    with (
        Publisher(store.url, run) as publisher,
        publisher.trajectory("g", 0, num_samples=1) as episode,
    ):
        agents = [
            threading.Thread(
                target=lambda p=p: [episode.append(ids(p), ids("z")) for _ in "12345"], daemon=True
            )
            for p in prompts
        ]
        for agent in agents:
            agent.start()
        for agent in agents:
            agent.join(20)
        episode.seal(1.0)

    spelled = store.read(run).spelled(TrajectoryKey("g", 0))
    assert sorted(spelled) == sorted([(prompt, "z") for prompt in prompts] * 5)


@pytest.mark.parametrize("kind", [Publisher, AsyncPublisher])
async def test_call_is_appended_once_also_after_adoption(store: Store, kind: Any) -> None:
    run, key = store.new_run(), TrajectoryKey("g", 0)
    calls = {"a": (ids("ab"), ids("c")), "b": (ids("ab"), ids("d")), "c": (ids("abde"), ids("f"))}

    async def append_all(episode: Any, names: str) -> None:
        receipts = [
            await finish(partial(episode.append, *calls[name], call_id=name)) for name in names
        ]
        for receipt in receipts:
            await finish(receipt.result)
        with pytest.raises(ConflictError, match="turn 0 of g/0/0 has the call_id 'a', with"):
            await finish(partial(episode.append, *calls["b"], call_id="a"))

    async with (
        entered(kind(store.url, run, writer="w")) as first,
        entered(kind(store.url, run, writer="w")) as second,
    ):
        episode = first.trajectory("g", 0, num_samples=1)
        assert episode.call_ids == {}
        await append_all(episode, "abaab")
        assert episode.call_ids == {"a": 0, "b": 1}
        adopted = await finish(partial(second.adopt, "g", 0))
        assert adopted.call_ids == {"a": 0, "b": 1}
        await append_all(adopted, "bacac")
        with pytest.raises(InvalidTurnError, match="siblings: turns 0 and 1 have the same prompt"):
            await finish(partial(adopted.seal, 1.0, siblings="refuse"))
        await finish(partial(adopted.seal, 1.0, siblings="mask"))

    stored = store.read(run)
    assert [one.call_id for one in stored.turns(key)] == ["a", "b", "c"]
    (seal,) = (each for each in stored.events() if isinstance(each, SealedTrajectory))
    assert [shape.is_left_out for shape in seal.turns] == [True, False, False]


def test_seal_takes_the_status_of_the_last_turn(store: Store) -> None:
    run = store.new_run()
    with Publisher(store.url, run) as publisher, publisher.group("g", 3) as group:
        turns = (["error", "completed"], ["completed", "aborted"], ["error"])
        given = (None, None, "truncated")
        for writer, statuses, sealed in zip(group, turns, given, strict=True):
            for status in statuses:
                writer.append(ids("ab"), ids("C"), status=status)
            writer.seal(1.0, status=sealed)
        with publisher.trajectory("h", 0, num_samples=1) as other:
            with pytest.raises(InvalidTurnError, match="status: 'cut' is not one of completed"):
                other.append(ids("ab"), ids("C"), status="cut")
            other.append(ids("ab"), [], status="truncated", allow_empty=True)
            other.seal(0.0)

    events = store.read(run).events()
    statuses = [event.status.value for event in events if isinstance(event, SealedTrajectory)]
    assert statuses == ["completed", "aborted", "truncated", "truncated"]


async def test_only_a_failed_start_is_sealed_without_a_turn(store: Store) -> None:
    run = store.new_run()
    failed = replace(trajectory(sample=0, reward=None, status=Status.ERROR), turns=())
    for number, kind in enumerate([Publisher, AsyncPublisher]):
        async with entered(kind(store.url, run)) as publisher:
            async with entered(publisher.trajectory(f"g{number}", 0, num_samples=1)) as writer:
                with pytest.raises(InvalidTurnError, match="turns: there is none; only status='er"):
                    await finish(partial(writer.seal, 1.0, status="truncated"))
                tags = {"why": "no sandbox"}
                await finish(partial(writer.seal, status="error", tags=tags))
            receipt = await finish(partial(publisher.publish, group(f"p{number}", failed)))
            await finish(receipt.result)

    stored = store.read(run)
    seals = [event for event in stored.events() if isinstance(event, SealedTrajectory)]
    assert [(seal.key.group_id, seal.status, seal.turns) for seal in seals] == [
        (name, Status.ERROR, ()) for name in ("g0", "p0", "g1", "p1")
    ]
    assert {*stored.states().values()} == {"sealed"}
    assert len(stored.records(TrajectoryKey("g0", 0))) == 1


@pytest.mark.parametrize("kind", [Publisher, AsyncPublisher])
async def test_group_ends_whole_and_ended_trajectories_refuse_writes(
    store: Store, kind: Any
) -> None:
    run = store.new_run()
    turn_of_one = (ids("ab"), ids("c"))

    async with (
        entered(kind(store.url, run)) as publisher,
        entered(publisher.group("g", 5)) as visit,
    ):
        async with entered(visit.trajectory(0)) as episode:
            with pytest.raises(InvalidTurnError, match="turns: there is none"):
                await finish(lambda: episode.seal(1.0))
            await finish(lambda: episode.append(*turn_of_one))
            await finish(lambda: episode.seal(1.0))
            for write in (
                lambda: episode.append(*turn_of_one),
                lambda: episode.seal(1.0),
                lambda: episode.abandon("late"),
            ):
                with pytest.raises(RejectedError, match="sealed or abandoned"):
                    await finish(write)
        async with entered(visit.trajectory(1)) as unsealed:
            await finish(lambda: unsealed.append(*turn_of_one))
        visit.trajectory(2).abandon("too hard")
        with contextlib.suppress(RuntimeError):
            async with entered(visit.trajectory(4)):
                raise RuntimeError("the tool broke")

    assert store.read(run).ledger() == {
        "g/0/0": "sealed:1",
        "g/1/0": "abandoned:left without a seal",
        "g/2/0": "abandoned:too hard",
        "g/3/0": "abandoned:never started",
        "g/4/0": "abandoned:RuntimeError: the tool broke",
    }


async def test_a_unix_socket_is_as_good_as_a_port(
    unix_server: EmbeddedServer, new_run: Callable[..., str]
) -> None:
    with connect(unix_server.url) as client:
        run = new_run(client)
        with Publisher(unix_server.url, run) as publisher:
            publisher.publish(group("g"))
        async with AsyncPublisher(unix_server.url, run) as publisher:
            await publisher.publish(group("h"))

        assert RunReader(client, run).counts() == {"accepted": 4, "sealed": 4}


KEY = TrajectoryKey("g", 0)


async def test_seal_does_not_overtake_a_turn_that_waits_for_capacity(own_store: Store) -> None:
    run = own_store.new_run()

    async with AsyncPublisher(own_store.url, run, max_inflight_bytes=64) as publisher:
        episode = publisher.trajectory("g", 0, num_samples=1)
        await (await episode.append(ids("ab"), ids("c")))
        own_store.server.kill()
        await episode.append(ids("abc"), ids("d"))
        waiting = asyncio.create_task(episode.append(ids("abcd"), ids("e")))
        sealing = asyncio.create_task(episode.seal(1.0))
        await wait_until_async(
            lambda: publisher.statistics().num_retries > 1, describe="failing writes"
        )
        was_waiting = not waiting.done()
        await asyncio.to_thread(own_store.server.restart)
        await asyncio.gather(waiting, sealing)

    assert was_waiting
    assert len(own_store.read(run).spelled(KEY)) == 3
    assert own_store.read(run).states() == {"g/0/0": "sealed"}


async def test_a_publisher_whose_closing_is_cancelled_has_disconnected(own_store: Store) -> None:
    run = own_store.new_run()
    publisher = AsyncPublisher(own_store.url, run)
    await publisher.lapsed()
    await publisher.publish(group("g"))
    await publisher.flush()

    closing = asyncio.create_task(publisher.close())
    while not closing.done():
        await asyncio.sleep(0)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing

    await wait_until_async(
        lambda: len(own_store.client.client_list()) == 1, describe="the end of all others"
    )
