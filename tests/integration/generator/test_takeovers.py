"""Taking over what another generator left open: its turns, its seal, its names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit import ids, wait_until, wait_until_async
from turnstream.batching.merge.merged_extras import MergedRow, merged_sequence_columns
from turnstream.batching.merge.merging import plan_sequences
from turnstream.errors import ConflictError, FencedError, InvalidTurnError
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.generator.api.takeovers import take_over
from turnstream.generator.transport.steps import take_steps
from turnstream.store.client import keys
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.types import DeclaredColumn, SealedTrajectory, TrajectoryKey
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

NewRun = Callable[..., str]
Read = Callable[[redis.Redis, str], Any]
LEASE_S = 0.5
KEY = TrajectoryKey("g", 0)


def is_lapsed(publisher: Publisher) -> None:
    wait_until(
        lambda: KEY in [lapsed.key for lapsed in publisher.lapsed()], describe="the end of a lease"
    )


def test_restarted_generator_continues_at_once(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)
    with Publisher(server.url, run, writer="w") as publisher:
        publisher.trajectory("g", 0, num_samples=1).append(ids("ab"), ids("c")).result(10)

    with Publisher(server.url, run, writer="w") as publisher:
        episode = publisher.take_over("g", 0)
        episode.append(ids("abcd"), ids("e"))
        episode.seal(1.0)

    assert read(client, run).spelled(KEY) == [("ab", "c"), ("abcd", "e")]


def test_a_trajectory_without_a_turn_is_taken_over_too(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client, lease_s=LEASE_S)
    with Publisher(server.url, run) as gone:
        gone.trajectory("g", 0, num_samples=2).__enter__()

    with Publisher(server.url, run) as publisher:
        is_lapsed(publisher)
        episode = publisher.take_over("g", 0)
        episode.append(ids("ab"), ids("c"))
        episode.seal(1.0)

    assert episode.turns == ()
    assert read(client, run).spelled(KEY) == [("ab", "c")]


def test_stored_seal_without_an_event_counts(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client, lease_s=LEASE_S)
    with Publisher(server.url, run) as gone:
        gone.trajectory("h", 0, num_samples=1).append(ids("ab"), ids("c")).result(10)
        episode = gone.trajectory("g", 0, num_samples=1)
        episode.append(ids("ab"), ids("c"))
        episode.seal(1.0)
    forget_the_seal(client, run)

    with (
        Publisher(server.url, run, writer="second") as publisher,
        pytest.raises(ConflictError, match="g/0/0 is sealed: its writer stored the seal"),
    ):
        publisher.take_over("g", 0)

    stored = read(client, run)
    assert stored.ledger()["g/0/0"] == "sealed:2"
    assert stored.sealed() == [KEY, KEY]
    assert stored.counts() == {"accepted": 2, "open": 1, "sealed": 1}


def test_stored_seal_without_an_event_still_awaits_its_reward(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client, lease_s=LEASE_S)
    with Publisher(server.url, run) as gone:
        episode = gone.trajectory("g", 0, num_samples=1)
        episode.append(ids("ab"), ids("c"))
        episode.seal(awaits_reward=True)
    forget_the_seal(client, run, state="awaiting_reward")

    with (
        Publisher(server.url, run, writer="second") as publisher,
        pytest.raises(ConflictError, match="g/0/0 is sealed: its writer stored the seal"),
    ):
        publisher.take_over("g", 0)

    assert read(client, run).ledger()["g/0/0"] == "awaiting_reward:2"


def forget_the_seal(
    client: redis.Redis, run: str, *, epoch: int = 1, state: str = "sealed"
) -> None:
    """As if the writer of g/0/0 had died before it told the run."""
    names = keys.run_keys(run)
    client.hset(names.ledger, "g/0/0", f"open:{epoch}:gone")
    client.hincrby(names.counts, state, -1)
    client.hincrby(names.counts, "open", 1)
    client.zadd(names.leases, {"g/0/0": 1})


@pytest.mark.parametrize(
    ("name", "sample", "attempt", "field"),
    [
        ("", 0, 0, "group_id"),
        ("g", -1, 0, "sample"),
        ("g", "0", 0, "sample"),
        ("g", 0, -1, "attempt"),
    ],
)
def test_a_key_that_cannot_be_is_refused(
    server: EmbeddedServer,
    client: redis.Redis,
    new_run: NewRun,
    name: str,
    sample: Any,
    attempt: int,
    field: str,
) -> None:
    with (
        Publisher(server.url, new_run(client)) as publisher,
        pytest.raises(InvalidTurnError, match=f"^{field}: "),
    ):
        publisher.take_over(name, sample, attempt)


async def test_both_publishers_take_over_alike(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client, lease_s=LEASE_S)
    async with AsyncPublisher(server.url, run) as gone:
        episode = gone.trajectory("g", 0, num_samples=1)
        await (await episode.append(ids("ab"), ids("c")))

    async with AsyncPublisher(server.url, run) as publisher:

        async def lapsed() -> bool:
            return [found.key for found in await publisher.lapsed()] == [KEY]

        await wait_until_async(lapsed, describe="the end of a lease")
        taken = await publisher.take_over("g", 0)
        await taken.append(ids("abcd"), ids("e"))
        await taken.seal(1.0)

    assert [each.response_ids.tolist() for each in taken.turns] == [[ord("c")]]
    assert read(client, run).spelled(KEY) == [("ab", "c"), ("abcd", "e")]
    forget_the_seal(client, run, epoch=2)
    async with AsyncPublisher(server.url, run) as publisher:
        with pytest.raises(ConflictError, match="g/0/0 is sealed"):
            await publisher.take_over("g", 0)


PER_TOKEN = DeclaredColumn(name="positions", per="token", dtype="int32", fill=7, is_optional=True)
PROMPTS = ["ab", "abCd", "abCdEf"]


def gappy_turns(given: str) -> list[dict[str, Any]]:
    """Arguments of `append` for three turns; "+" is a turn that has the column."""
    return [
        {
            "prompt_ids": ids(prompt),
            "response_ids": ids(response),
            "extras": {"positions": range(len(prompt) + 1)} if sign == "+" else None,
        }
        for prompt, response, sign in zip(PROMPTS, "CEG", given, strict=True)
    ]


GAPS = pytest.mark.parametrize("given", ["+-+", "-++", "--+", "+--", "-+-"])


@GAPS
def test_take_over_resumes_after_turns_that_left_a_column_out(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read, given: str
) -> None:
    # After a turn without an optional per-token column, a later turn had it. Then `take_over`
    # raised "InvalidTurnError: extras['positions']: 3 values shared with turn 0".
    run, other = (new_run(client, extra_columns=(PER_TOKEN,)) for _ in range(2))
    turns = gappy_turns(given)
    with Publisher(server.url, run, writer="w") as publisher:
        episode = publisher.trajectory("g", 0, num_samples=1)
        for each in turns:
            episode.append(**each)
        episode.seal(1.0)

    with Publisher(server.url, other, writer="w") as publisher:
        publisher.trajectory("g", 0, num_samples=1).append(**turns[0]).result(10)
    for each in turns[1:]:
        with Publisher(server.url, other, writer="w") as publisher:
            publisher.take_over("g", 0).append(**each).result(10)
    with Publisher(server.url, other, writer="w") as publisher:
        episode = publisher.take_over("g", 0)
        episode.seal(1.0)

    assert turn_records(read(client, other)) == turn_records(read(client, run))
    assert ["+" if each.extras else "-" for each in episode.turns] == list(given)
    assert row_of(read(client, other)) == row_of(read(client, run))


def turn_records(stored: Any) -> list[bytes]:
    """The stored turns of g/0/0 as bytes, without the seal."""
    return stored.records(KEY)[:-1]


def row_of(stored: Any) -> tuple[list[int], list[int]]:
    """Tokens and positions of the row that g/0/0 makes."""
    (lengths,) = [each for each in stored.events() if isinstance(each, SealedTrajectory)]
    (shape,) = plan_sequences(lengths.turns, merge=True)
    turns = stored.turns(KEY)
    row = MergedRow(turns, shape.turns, [(0, 1), (2, 3), (4, 5)], shape.num_tokens)
    (columns,) = merged_sequence_columns([row], [PER_TOKEN])
    tokens = [token for each in turns for token in each.token_ids.tolist()]
    return tokens, columns["positions"].values.tolist()


class Sleepy(redis.Redis):
    """Sleeps before a command, while somebody else does something."""

    slept: tuple[str, Callable[[], None]]

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """The reply."""
        if args[0] == self.slept[0]:
            self.slept[1]()
        return super().execute_command(*args, **options)


@pytest.fixture
def left_open(server: EmbeddedServer, client: redis.Redis, new_run: NewRun) -> str:
    """A run in which g/0/0 has one turn, and its lease has ended."""
    run = new_run(client)
    with Publisher(server.url, run) as gone:
        gone.trajectory("g", 0, num_samples=1).append(ids("ab"), ids("c")).result(10)
    client.zadd(keys.run_keys(run).leases, {"g/0/0": 1})
    return run


@pytest.fixture
def another_seals(
    server: EmbeddedServer, client: redis.Redis, left_open: str
) -> Callable[[], None]:
    """A third writer takes g/0/0 over, and seals it."""

    def seal() -> None:
        client.zadd(keys.run_keys(left_open).leases, {"g/0/0": 1})
        with Publisher(server.url, left_open, writer="third") as third:
            third.take_over("g", 0).seal(1.0)

    return seal


@pytest.mark.parametrize("command", ["XRANGE", "HMGET"])
def test_sleeper_gets_an_error_after_another_adopted_and_sealed(
    server: EmbeddedServer, left_open: str, another_seals: Callable[[], None], command: str
) -> None:
    # The seal of the third writer came between what the second read of the payload: it was taken
    # for a turn, and the payload for damaged.
    sleepy: Any = Sleepy.from_url(server.url)
    sleepy.slept = command, another_seals
    wait = StoreWait(sleepy, None, "not taken over", wait_s=10)
    with sleepy, pytest.raises(FencedError, match="epoch 2, and is by now that of epoch 3"):
        take_steps(sleepy, take_over(left_open, writer="second", key=KEY), wait)
