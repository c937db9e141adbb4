from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit import group, ids, trajectory, turn
from turnstream.errors import (
    RejectedError,
)
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.types import (
    GroupOpened,
    Status,
    TrajectoryAbandoned,
    TrajectoryKey,
    VersionRun,
)
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

NewRun = Callable[..., str]
Read = Callable[[redis.Redis, str], Any]


def test_five_lines_bring_a_trajectory_into_the_run(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    with (
        Publisher(server.url, run, writer="w") as publisher,
        publisher.trajectory("g", 0, num_samples=1, prompt_uid="p") as episode,
    ):
        episode.append([1, 2, 3], [4, 5], logprobs=[-0.5, -0.25], policy_version=7)
        episode.append([1, 2, 3, 4, 5, 6], [7], logprobs=[-1.0], policy_version=8)
        episode.seal(reward=0.5, tags={"env": "guess"}, metrics={"n": 2}, sampling={"t": 1})

    stored = read(client, run)
    opened, seal = stored.events()
    assert opened == GroupOpened(group_id="g", prompt_uid="p", num_samples=1)
    assert [t.token_ids.tolist() for t in stored.turns(seal.key)] == [[1, 2, 3, 4, 5], [6, 7]]
    assert [(s.parent_turn, s.shared_tokens) for s in seal.turns] == [(-1, 0), (0, 5)]
    assert (seal.reward, seal.status, seal.lease_epoch) == (0.5, Status.COMPLETED, 1)
    assert (seal.oldest_version, seal.newest_version, seal.has_logprobs) == (7, 8, True)
    assert (seal.tags, seal.metrics, seal.sampling) == ({"env": "guess"}, {"n": 2.0}, {"t": 1.0})
    assert stored.counts() == {"accepted": 1, "sealed": 1}


def test_the_seal_in_the_stream_is_the_event_of_the_run(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    with Publisher(server.url, run) as publisher:
        publisher.publish(group("g", trajectory(turn("a", "B"), turn("abc", "D"))))

    *turns, last = read(client, run).records(TrajectoryKey("g", 0))
    (_, seal) = read(client, run).events()
    entries: Any = client.xrange(keys.run_keys(run).events)
    assert entries[-1][1][b"r"] == last
    assert seal.payload_crcs == tuple(int.from_bytes(record[-4:], "little") for record in turns)
    assert seal.num_payload_bytes == sum(map(len, turns))


def test_a_whole_group_is_published_with_one_call(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)
    members = [trajectory(turn("ab", "CD"), sample=n, reward=float(n)) for n in range(3)]

    with Publisher(server.url, run) as publisher:
        publisher.publish(group("g", *members, prompt_uid="p")).result(10)
        statistics = publisher.statistics()

    stored = read(client, run)
    assert stored.sealed() == [TrajectoryKey("g", n) for n in range(3)]
    assert stored.events()[0] == GroupOpened(group_id="g", prompt_uid="p", num_samples=3)
    assert stored.spelled(TrajectoryKey("g", 2)) == [("ab", "cd")]
    assert (statistics.num_trajectories, statistics.num_turns) == (3, 3)
    assert statistics.inflight_bytes == 0


def test_many_groups_travel_together_and_all_arrive(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    with Publisher(server.url, run) as publisher:
        for number in range(60):
            publisher.publish(group(f"g{number}"))

    assert read(client, run).counts() == {"accepted": 120, "sealed": 120}
    assert len(set(read(client, run).sealed())) == 120


def test_alternating_branches_send_only_what_is_new(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)
    agent, helper = "the agent's long context " * 40, "the helper's own context " * 40
    turns = [
        turn(agent, "AB"),
        turn(helper, "CD"),
        turn(agent + "abx", "EF"),
        turn(helper + "cdy", "GH"),
        turn(agent + "abxefz", "IJ"),
    ]

    with Publisher(server.url, run) as publisher:
        publisher.publish(group("g", trajectory(*turns))).result(10)
        statistics = publisher.statistics()

    stored = read(client, run).turns(TrajectoryKey("g", 0))
    new_tokens = [len(agent) + 2, len(helper) + 2 - 4, 3, 3, 3]  # both contexts begin with "the "
    assert [s.parent_turn for s in stored] == [-1, 0, 0, 1, 2]
    assert [len(s.token_ids) for s in stored] == new_tokens
    full_tokens = sum(len(t.prompt_ids) + len(t.response_ids) for t in turns)
    assert 4 * sum(new_tokens) < statistics.wire_bytes < 4 * sum(new_tokens) + 60 * len(turns)
    assert statistics.resend_bytes - statistics.wire_bytes == 4 * (full_tokens - sum(new_tokens))
    assert statistics.turn_tokens == full_tokens
    assert statistics.merged_tokens == len(agent) + len(helper) + 8 + 5


def test_a_response_that_is_continued_has_an_empty_prompt_delta(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    with (
        Publisher(server.url, run) as publisher,
        publisher.trajectory("g", 0, num_samples=1) as episode,
    ):
        episode.append(ids("ab"), ids("cd"), version_runs=[VersionRun(1, 1), VersionRun(2, 1)])
        episode.append(ids("abcd"), ids("ef"), policy_version=2)
        episode.seal(1.0)

    first, second = read(client, run).turns(TrajectoryKey("g", 0))
    assert len(second.new_prompt_ids) == 0
    assert first.version_runs == ((1, 1), (2, 1))


def test_an_append_returns_before_it_is_acknowledged_and_a_seal_after(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    with (
        Publisher(server.url, run) as publisher,
        publisher.trajectory("g", 0, num_samples=1) as episode,
    ):
        receipt = episode.append(ids("ab"), ids("c"))
        receipt.result(10)
        is_stored = len(read(client, run).records(TrajectoryKey("g", 0)))
        episode.seal(1.0)
        states = read(client, run).states()

    assert receipt.is_done
    assert is_stored == 1
    assert states == {"g/0/0": "sealed"}


def test_parallel_agents_share_one_numbering(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)
    prompts = [chr(97 + agent) * (50 + agent) for agent in range(8)]

    with (
        Publisher(server.url, run) as publisher,
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

    spelled = read(client, run).spelled(TrajectoryKey("g", 0))
    assert sorted(spelled) == sorted([(prompt, "z") for prompt in prompts] * 5)


def test_an_exception_abandons_the_trajectory_with_its_reason(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    def play(episode: Any) -> None:
        episode.append(ids("ab"), ids("c"))
        raise RuntimeError("the tool broke")

    with (
        Publisher(server.url, run) as publisher,
        pytest.raises(RuntimeError),
        publisher.trajectory("g", 0, num_samples=1) as episode,
    ):
        play(episode)

    stored = read(client, run)
    assert stored.ledger() == {"g/0/0": "abandoned:RuntimeError: the tool broke"}
    assert stored.events()[-1] == TrajectoryAbandoned(
        key=TrajectoryKey("g", 0), reason="RuntimeError: the tool broke"
    )
    assert len(stored.records(TrajectoryKey("g", 0))) == 1
    assert stored.counts() == {"accepted": 1, "abandoned": 1}


def test_a_trajectory_left_without_a_seal_is_abandoned(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    with (
        Publisher(server.url, run) as publisher,
        publisher.trajectory("g", 0, num_samples=1) as episode,
    ):
        episode.append(ids("ab"), ids("c"))

    assert read(client, run).ledger() == {"g/0/0": "abandoned:left without a seal"}


def test_an_abandoned_sample_can_be_tried_again(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    with Publisher(server.url, run) as publisher:
        publisher.trajectory("g", 0, num_samples=1).abandon("never opened").result(10)
        with publisher.trajectory("g", 0, num_samples=1) as first:
            first.abandon("no luck").result(10)
        with publisher.trajectory("g", 0, num_samples=1, attempt=1) as second:
            second.append(ids("ab"), ids("c"))
            second.seal(1.0)

    assert read(client, run).states() == {"g/0/0": "abandoned", "g/0/1": "sealed"}


def test_a_group_ends_whole_even_if_its_generator_does_not_finish_it(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    with Publisher(server.url, run) as publisher, publisher.group("g", 4) as visit:
        with visit.trajectory(0) as episode:
            episode.append(ids("ab"), ids("c"))
            episode.seal(1.0)
        visit.trajectory(1).append(ids("ab"), ids("d"))
        visit.trajectory(2).abandon("too hard")

    assert read(client, run).ledger() == {
        "g/0/0": "sealed:1",
        "g/1/0": "abandoned:left without a seal",
        "g/2/0": "abandoned:too hard",
        "g/3/0": "abandoned:never started",
    }


def test_an_ended_trajectory_takes_nothing_more(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(client)

    with (
        Publisher(server.url, run) as publisher,
        publisher.trajectory("g", 0, num_samples=1) as episode,
    ):
        episode.append(ids("ab"), ids("c"))
        episode.seal(1.0)
        for write in (
            lambda: episode.append(ids("ab"), ids("c")),
            lambda: episode.seal(1.0),
            lambda: episode.abandon("late"),
        ):
            with pytest.raises(RejectedError, match="sealed or abandoned"):
                write()


async def test_a_unix_socket_is_as_good_as_a_port(
    unix_server: EmbeddedServer, new_run: NewRun, read: Read
) -> None:
    with connect(unix_server.url) as client:
        run = new_run(client)
        with Publisher(unix_server.url, run) as publisher:
            publisher.publish(group("g"))
        async with AsyncPublisher(unix_server.url, run) as publisher:
            await publisher.publish(group("h"))

        assert read(client, run).counts() == {"accepted": 4, "sealed": 4}
