"""Leases of generators: renewed while they run, lost after a sleep or a kill."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Self

import pytest
import redis
import redis.asyncio

from testkit import ids, wait_until
from testkit.services.stores import Store, wait_for_lapse
from turnstream.errors import ConflictError, FencedError
from turnstream.generator import Publisher
from turnstream.generator.api.work import adopt_trajectory
from turnstream.generator.transport.transport import BoundedCalls, RedisRequests
from turnstream.records.turns import decode_turn
from turnstream.store.client import keys
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.types import SealedTrajectory, TrajectoryKey

pytestmark = pytest.mark.redis

LEASE_S = 0.5
KEY = TrajectoryKey("g", 0)

# A generator that writes two turns, reports them, and then runs one command per line.
GENERATOR = """
import sys
from turnstream.errors import TurnstreamError
from turnstream.generator import Publisher
from testkit import ids

url, run = sys.argv[1:]
with Publisher(url, run, writer="first") as publisher:
    episode = publisher.trajectory("g", 0, num_samples=1)
    other = publisher.trajectory("h", 0, num_samples=1)
    other.append(ids("x"), ids("y")).result(10)
    for prompt, response in (("ab", "c"), ("abcd", "e")):
        episode.append(ids(prompt), ids(response)).result(10)
    print("wrote", flush=True)
    for line in sys.stdin:
        try:
            if line == "append\\n":
                episode.append(ids("abcdex"), ids("late")).result(10)
            elif line == "seal\\n":
                episode.seal(1.0)
            elif line == "other\\n":
                other.append(ids("xyz"), ids("w")).result(10)
                other.seal(1.0)
            print("done", flush=True)
        except TurnstreamError as error:
            print(type(error).__name__, error, flush=True)
"""


class Generator:
    """A generator process."""

    def __init__(self, url: str, run: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", GENERATOR, url, run],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.reply() == "wrote"

    def request(self, line: str) -> str:
        """Run one command; return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.reply()

    def reply(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_turns_of_a_killed_generator_can_be_continued_by_another(store: Store) -> None:
    run = store.new_run()
    with Generator(store.url, run):  # it is killed at the end of the block
        pass

    with Publisher(store.url, run, writer="second") as publisher:
        with pytest.raises(ConflictError, match="g/0/0 is being written by first"):
            publisher.adopt("g", 0)
        store.client.zadd(keys.run_keys(run).leases, {"g/0/0": 1})  # a minute later
        episode = publisher.adopt("g", 0)
        context = [*episode.turns[-1].prompt_ids, *episode.turns[-1].response_ids]
        episode.append([*context, ord("f")], ids("g"))
        episode.seal(1.0)

    stored = store.read(run)
    (event,) = (event for event in stored.events() if isinstance(event, SealedTrajectory))
    assert [bytes(each.prompt_ids.tolist()) for each in episode.turns] == [b"ab", b"abcd"]
    assert stored.spelled(KEY) == [("ab", "c"), ("abcd", "e"), ("abcdef", "g")]
    assert stored.turns(KEY)[2].parent_turn == 1
    assert len(stored.turns(KEY)[2].token_ids) == 2  # "f" and "g": the rest is not sent again
    assert event.lease_epoch == 2
    assert event.payload_crcs == tuple(
        decode_turn(record).payload_crc for record in stored.records(KEY)[:-1]
    )
    assert stored.states()["g/0/0"] == "sealed"


def test_generator_that_slept_gets_the_new_owner_and_writes_nothing(store: Store) -> None:
    run = store.new_run(lease_s=LEASE_S)

    with (
        Generator(store.url, run) as generator,
        Publisher(store.url, run, writer="second") as publisher,
    ):
        generator.process.send_signal(signal.SIGSTOP)
        wait_for_lapse(publisher, KEY)
        episode = publisher.adopt("g", 0)
        generator.process.send_signal(signal.SIGCONT)
        late = [generator.request(line) for line in ("append", "append", "seal", "other")]
        episode.append(ids("abcdef"), ids("g"))
        episode.seal(1.0)

    stored = store.read(run)
    assert all(answer.startswith("FencedError") for answer in late[:3])
    assert late[2] == "FencedError g/0/0 was adopted by second with epoch 2" or (
        "epoch 2 writes" in late[2]
    )
    assert late[3] == "done"
    assert stored.spelled(KEY) == [("ab", "c"), ("abcd", "e"), ("abcdef", "g")]
    assert stored.counts() == {"accepted": 2, "sealed": 2}


def test_closed_publisher_warns_of_open_trajectories(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    run = store.new_run(lease_s=LEASE_S)
    with Publisher(store.url, run, writer="w") as publisher:
        publisher.trajectory("g", 0, num_samples=1).append(ids("ab"), ids("c")).result(10)

    with Publisher(store.url, run) as other:
        wait_for_lapse(other, KEY)

    assert "w leaves 1 trajectories open" in caplog.text


def test_lease_is_renewed_while_a_turn_is_on_a_slow_link(
    store: Store, proxy_to: Callable[[str], Any]
) -> None:
    run = store.new_run(lease_s=1.5)
    proxy = proxy_to(store.url)
    proxy.requests.bytes_per_s = 1e5
    leases = keys.run_keys(run).leases

    with Publisher(proxy.url, run) as publisher:
        episode = publisher.trajectory("g", 0, num_samples=1)
        pending = episode.append(ids("a" * 250_000), ids("b"))  # ten seconds
        for _ in range(2):  # a heartbeat may have been sent before the turn
            ends: Any = store.client.zscore(leases, KEY.readable_name)
            wait_until(
                lambda ends=ends: store.client.zscore(leases, KEY.readable_name) > ends,
                describe="the renewal of the lease",
            )
        was_done = pending.is_done
        proxy.requests.bytes_per_s = 0
        pending.result(30)
        episode.seal(1.0)

    assert not was_done


@pytest.mark.parametrize(
    ("fields", "state"), [({"reward": 1.0}, "sealed"), ({"awaits_reward": True}, "awaiting_reward")]
)
def test_stored_seal_without_an_event_counts(
    store: Store, fields: dict[str, Any], state: str
) -> None:
    run = store.new_run(lease_s=LEASE_S)
    with Publisher(store.url, run) as gone:
        gone.trajectory("h", 0, num_samples=1).append(ids("ab"), ids("c")).result(10)
        episode = gone.trajectory("g", 0, num_samples=1)
        episode.append(ids("ab"), ids("c"))
        episode.seal(**fields)
    forget_the_seal(store.client, run, state=state)

    with (
        Publisher(store.url, run, writer="second") as publisher,
        pytest.raises(ConflictError, match="g/0/0 is sealed: its writer stored the seal"),
    ):
        publisher.adopt("g", 0)

    stored = store.read(run)
    assert stored.ledger()["g/0/0"] == f"{state}:2"
    assert stored.sealed() == [KEY, KEY]
    assert stored.counts() == {"accepted": 2, "open": 1, state: 1}


def forget_the_seal(
    client: redis.Redis, run: str, *, epoch: int = 1, state: str = "sealed"
) -> None:
    """As if the writer of g/0/0 had died before it told the run."""
    names = keys.run_keys(run)
    client.hset(names.ledger, "g/0/0", f"open:{epoch}:gone")
    client.hincrby(names.counts, state, -1)
    client.hincrby(names.counts, "open", 1)
    client.zadd(names.leases, {"g/0/0": 1})


class Sleepy(redis.asyncio.Redis):
    """Sleeps before a command, while another writer does something."""

    slept: tuple[str, Callable[[], None]]

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """The reply."""
        if args[0] == self.slept[0]:
            await asyncio.to_thread(self.slept[1])
        return await super().execute_command(*args, **options)


@pytest.fixture
def left_open(store: Store) -> str:
    """A run in which g/0/0 has one turn, and its lease has ended."""
    run = store.new_run()
    with Publisher(store.url, run) as gone:
        gone.trajectory("g", 0, num_samples=1).append(ids("ab"), ids("c")).result(10)
    store.client.zadd(keys.run_keys(run).leases, {"g/0/0": 1})
    return run


@pytest.fixture
def another_seals(store: Store, left_open: str) -> Callable[[], None]:
    """A third writer takes g/0/0 over, and seals it."""

    def seal() -> None:
        store.client.zadd(keys.run_keys(left_open).leases, {"g/0/0": 1})
        with Publisher(store.url, left_open, writer="third") as third:
            third.adopt("g", 0).seal(1.0)

    return seal


@pytest.mark.parametrize("command", ["XRANGE", "HMGET"])
async def test_sleeper_gets_an_error_after_another_adopted_and_sealed(
    store: Store, left_open: str, another_seals: Callable[[], None], command: str
) -> None:
    # The seal of the third writer came between what the second read of the payload: it was taken
    # for a turn, and the payload for damaged.
    sleepy: Any = Sleepy.from_url(store.url)
    sleepy.slept = command, another_seals
    calls = BoundedCalls(RedisRequests(sleepy), StoreWait("store", None, "not adopted", wait_s=10))
    with pytest.raises(FencedError, match="epoch 2, and is by now that of epoch 3"):
        await adopt_trajectory(calls, left_open, writer="second", key=KEY)
    await sleepy.aclose()
