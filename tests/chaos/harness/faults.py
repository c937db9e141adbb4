"""The faults that a long run draws from, each as a function of the running stack."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from harness.machine import Machine
from harness.proxy import Proxy
from harness.rig import LEASE_S, Rig, asleep
from turnstream_server.jobs.stack import Service

HOUR_S = 3600.0

BATCHER_FAILPOINTS = (
    "plan.before_check",
    "plan.before_write",
    "plan.after_write",
    "session.before_start",
    "session.after_start",
    "get.after_header",
    "get.after_data",
    "stepped.before",
    "stepped.after",
    "committed.before",
    "committed.after",
)
RANK_FAILPOINTS = (
    "train.after_update",
    "train.after_stepped",
    "checkpoint.after_weights",
    "checkpoint.before_committed",
    "checkpoint.after_committed",
)


@dataclass(slots=True, kw_only=True)
class Stack:
    """What a long run keeps running.

    Attributes:
        rig: around the store.
        machine: the server's.
        store: proxy before the store; generators and batchers go through it.
        door: proxy before the first batcher; ranks go through it.
        rng: decides whatever is left to chance.
        batchers: by name.
        generators: by writer.
        num_writers: that there ever were.
    """

    rig: Rig
    machine: Machine
    store: Proxy
    door: Proxy
    rng: random.Random
    batchers: dict[str, Service] = field(default_factory=dict[str, Service])
    generators: dict[str, Service] = field(default_factory=dict[str, Service])
    num_writers: int = 0

    def start(self) -> None:
        """Two batchers, two generators and the ranks of a trainer."""
        for name in ("batcher", "other"):
            self.batchers[name] = self.rig.start_batcher(name).service
        for _ in range(2):
            self.start_generator()
        self.start_ranks()

    def start_generator(self) -> None:
        """A generator that nobody was before."""
        writer = f"w{self.num_writers}"
        self.num_writers += 1
        service = self.rig.start_generator(writer, groups=1_000_000, pause_s=0.1)
        self.generators[writer] = service

    def start_ranks(self, failpoint: str = "") -> None:
        """A new session of one to four ranks; whoever is left of the one before is killed."""
        for rank in self.rig.ranks:
            rank.kill()
        self.rig.start_ranks(
            self.rng.randint(1, 4),
            target=self.door.address,
            checkpoint_every=3,
            timeout_s=15,
            update_s=0.02,
            failpoint=failpoint,
        )

    def mend(self) -> None:
        """Start again what has ended, as whoever supervises processes does."""
        self.mend_services()
        if any(rank.status is not None for rank in self.rig.ranks):
            self.start_ranks()

    def mend_services(self) -> None:
        """The same, but for the ranks."""
        for name, batcher in self.batchers.items():
            if batcher.status is not None:
                self.batchers[name] = self.rig.start_batcher(name).service
        for writer, generator in list(self.generators.items()):
            if generator.status is not None:
                self.replace_generator(writer)

    def replace_generator(self, writer: str) -> None:
        """Another one takes a dead generator's place; what that left is given up with its lease."""
        del self.generators[writer]
        self.start_generator()

    def pause(self, seconds: float) -> None:
        """Let a fault last."""
        threading.Event().wait(seconds)


def kill_a_batcher(stack: Stack) -> None:
    """SIGKILL."""
    name = stack.rng.choice(list(stack.batchers))
    stack.batchers[name].kill()


def put_a_batcher_to_sleep(stack: Stack) -> None:
    """SIGSTOP for twice its lease."""
    name = stack.rng.choice(list(stack.batchers))
    with asleep(stack.batchers[name].pid):
        stack.pause(2 * LEASE_S)


def kill_a_batcher_at_a_failpoint(stack: Stack) -> None:
    """It dies at a step of planning or serving, if it comes there soon."""
    stack.batchers["batcher"].kill()
    failpoint = stack.rng.choice(BATCHER_FAILPOINTS)
    doomed = stack.rig.start_batcher("batcher", failpoint=failpoint).service
    stack.batchers["batcher"] = doomed
    with contextlib.suppress(TimeoutError):
        stack.rig.wait(lambda: doomed.status is not None, failpoint, timeout_s=3)
    doomed.kill()


def kill_a_rank(stack: Stack) -> None:
    """SIGKILL; the others go with it, and another world comes back."""
    stack.rng.choice(stack.rig.ranks).kill()


def kill_a_rank_at_a_failpoint(stack: Stack) -> None:
    """Between the acknowledgements, or while it writes its checkpoint."""
    failpoint = stack.rng.choice(RANK_FAILPOINTS)
    stack.start_ranks(f"{failpoint}@{stack.rng.randint(1, 3)}")

    def has_fallen() -> bool:
        stack.mend_services()
        return any(rank.status is not None for rank in stack.rig.ranks)

    stack.rig.wait(has_fallen, f"a rank that falls at {failpoint}", timeout_s=90.0)


def put_a_rank_to_sleep(stack: Stack) -> None:
    """SIGSTOP for a while."""
    with asleep(stack.rng.choice(stack.rig.ranks).pid):
        stack.pause(stack.rng.uniform(0.5, 2.0))


def kill_a_generator(stack: Stack) -> None:
    """SIGKILL, wherever it is."""
    stack.generators[stack.rng.choice(list(stack.generators))].kill()


def put_a_generator_to_sleep(stack: Stack) -> None:
    """SIGSTOP for a while."""
    with asleep(stack.generators[stack.rng.choice(list(stack.generators))].pid):
        stack.pause(stack.rng.uniform(0.5, 2.0))


def kill_the_store(stack: Stack) -> None:
    """SIGKILL and restart."""
    stack.rig.server.kill()
    stack.rig.server.restart()


def cut_the_stores_power(stack: Stack) -> None:
    """The append-only file ends where it had been synced."""
    stack.rig.server.kill()
    stack.machine.lose_power(stack.rig.server.data_dir)
    stack.rig.server.restart()


def put_the_store_to_sleep(stack: Stack) -> None:
    """SIGSTOP for longer than a lease."""
    with asleep(stack.rig.server.pid):
        stack.pause(stack.rng.uniform(0.5, 2 * LEASE_S))


def lose_replies_of_the_store(stack: Stack) -> None:
    """Connections are reset behind requests that have arrived."""
    for _ in range(3):
        stack.store.cut_next_reply(after_bytes=stack.rng.randint(0, 400))
        stack.pause(0.2)


def cut_all_connections_to_the_store(stack: Stack) -> None:
    """All at once."""
    stack.store.cut_all()


def silence_the_store(stack: Stack) -> None:
    """Half-open: requests arrive, answers never do, until the connections are reset."""
    stack.store.replies.is_silent = True
    stack.pause(stack.rng.uniform(0.5, 2.0))
    stack.store.replies.is_silent = False
    stack.store.cut_all()


def slow_the_store_down(stack: Stack) -> None:
    """Every answer is late."""
    stack.store.replies.delay_s = stack.rng.uniform(0.01, 0.1)
    stack.pause(2.0)
    stack.store.replies.delay_s = 0.0


def cut_transfers_to_the_ranks(stack: Stack) -> None:
    """In the middle of frames."""
    for _ in range(3):
        stack.door.cut_next_reply(after_bytes=stack.rng.randint(0, 4000))
        stack.pause(0.2)


def fill_the_stores_memory(stack: Stack) -> None:
    """Writes are refused for a while."""
    memory: Any = stack.rig.client.info("memory")
    stack.rig.client.config_set("maxmemory", memory["used_memory"])
    stack.pause(2.0)
    stack.rig.client.config_set("maxmemory", memory["maxmemory"])


def move_the_clock(stack: Stack) -> None:
    """By up to an hour, in either direction."""
    stack.machine.set_clock(wrong_by_s=stack.rng.uniform(-HOUR_S, HOUR_S))


FAULTS: tuple[Callable[[Stack], None], ...] = (
    kill_a_batcher,
    put_a_batcher_to_sleep,
    kill_a_batcher_at_a_failpoint,
    kill_a_rank,
    kill_a_rank_at_a_failpoint,
    put_a_rank_to_sleep,
    kill_a_generator,
    put_a_generator_to_sleep,
    kill_the_store,
    cut_the_stores_power,
    put_the_store_to_sleep,
    lose_replies_of_the_store,
    cut_all_connections_to_the_store,
    silence_the_store,
    slow_the_store_down,
    cut_transfers_to_the_ranks,
    fill_the_stores_memory,
    move_the_clock,
)
