"""The processes of a long run, and the faults that it draws from, each as a function of these.

A fault without effect raises `InVainError` and is not counted.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from harness.machine import Machine
from harness.proxy import Proxy
from harness.rig import ENDLESS, LEASE_S, Rig
from testkit.services.processes import frozen
from turnstream_server.embedded import Durability
from turnstream_server.launch.stack import Service

REFUSED = 3
"""Exit status of a rank that got a typed error. It may need an older checkpoint."""


class InVainError(Exception):
    """A fault took no effect, because it met no process."""


@dataclass(slots=True, kw_only=True)
class Stack:
    """The processes of a long run.

    Attributes:
        store_proxy: proxy before the store, for generators and batchers.
        batcher_proxy: proxy before the first batcher, for ranks.
        gateways: the gateways; every second generator writes over HTTP.
        clock_s: error of the store's clock.
    """

    rig: Rig
    machine: Machine
    store_proxy: Proxy
    batcher_proxy: Proxy
    rng: random.Random
    durability: Durability
    batchers: dict[str, Service] = field(default_factory=dict[str, Service])
    gateways: dict[str, Service] = field(default_factory=dict[str, Service])
    generators: dict[str, Service] = field(default_factory=dict[str, Service])
    num_started: int = 0
    clock_s: float = 0.0

    def start(self) -> None:
        """Start two batchers, a gateway, two generators and the ranks."""
        self.gateways["gateway"] = self.rig.start_gateway()
        self.batchers["other"] = self.rig.start_batcher("other", waits=False)
        self.batchers["batcher"] = self.rig.start_batcher()
        for _ in range(2):
            self.start_generator()
        self.start_ranks()

    def start_generator(self) -> None:
        """Start a generator with a new name, which also adopts most trajectories of dead ones.

        Every second one writes over HTTP.
        """
        writer = f"own{self.num_started}"
        url = f"http://{self.rig.address('gateway')}" if self.num_started % 2 else ""
        self.num_started += 1
        options = {"adopts_every": 2, "never_adopts_one_in": 4}
        service = self.rig.start_generator(writer, groups=ENDLESS, url=url, pause_s=0.1, **options)
        self.generators[writer] = service

    def start_ranks(self) -> None:
        """Kill the current ranks, and start a new session of one to four ranks."""
        was_refused = any(rank.status == REFUSED for rank in self.rig.ranks)
        for rank in self.rig.ranks:
            rank.kill()
        self.rig.start_ranks(
            self.rng.randint(1, 4),
            target=self.batcher_proxy.address,
            checkpoint_every=3,
            timeout_s=15,
            update_s=0.02,
            from_step=self.rig.checkpoint_of_store() if was_refused and self.rig.cuts else -1,
        )

    def mend(self) -> None:
        """Restart every process that has ended, as a supervisor does."""
        self.mend_services()
        if any(rank.status is not None for rank in self.rig.ranks):
            self.start_ranks()

    def mend_services(self) -> None:
        """Restart every process that has ended, except ranks."""
        for name, batcher in self.batchers.items():
            if batcher.status is not None:
                self.batchers[name] = self.rig.start_batcher(name)
        for name, gateway in self.gateways.items():
            if gateway.status is not None:
                self.gateways[name] = self.rig.start_gateway(name)
        for writer, generator in list(self.generators.items()):
            if generator.status is not None:
                del self.generators[writer]
                self.start_generator()

    def restart_store(self, *, power_off: bool = False) -> None:
        """Send SIGKILL and restart; a power cut also loses unsynced data.

        A store under everysec may answer before it has written.
        """
        server = self.rig.server
        server.kill()
        if power_off:
            self.machine.lose_power(server.data_dir)
        if self.durability == "everysec":
            self.rig.cuts.append(time.monotonic())
        server.restart()


HOUR_S = 3600.0
NUM_CUTS = 3
CUT_S = 3.0
"""Longest wait for replies that can be cut."""
LATE_SYNC_S = 1.5
"""Longest delay of the disk under everysec; publishers keep their writes for longer."""

Fault = Callable[[Stack], None]


def _one_of(stack: Stack, services: Iterable[Service]) -> Service:
    living = [service for service in services if service.status is None]
    if not living:
        raise InVainError("no process of this kind is alive")
    return stack.rng.choice(living)


def _sleep(stack: Stack, services: Iterable[Service], seconds: float) -> None:
    with frozen(_one_of(stack, services).pid):
        time.sleep(seconds)


def kill_a_batcher(stack: Stack) -> None:
    _one_of(stack, stack.batchers.values()).kill()


def put_a_batcher_to_sleep(stack: Stack) -> None:
    _sleep(stack, stack.batchers.values(), 2 * LEASE_S)


def kill_a_rank(stack: Stack) -> None:
    """Send SIGKILL; the other ranks end too, and a world of another size starts."""
    _one_of(stack, stack.rig.ranks).kill()


def put_a_rank_to_sleep(stack: Stack) -> None:
    _sleep(stack, stack.rig.ranks, stack.rng.uniform(0.5, 2.0))


def kill_a_generator(stack: Stack) -> None:
    _one_of(stack, stack.generators.values()).kill()


def put_a_generator_to_sleep(stack: Stack) -> None:
    _sleep(stack, stack.generators.values(), stack.rng.uniform(0.5, 2.0))


def kill_the_gateway(stack: Stack) -> None:
    """Send SIGKILL; generators over HTTP send again what was not acknowledged."""
    _one_of(stack, stack.gateways.values()).kill()


def put_the_gateway_to_sleep(stack: Stack) -> None:
    _sleep(stack, stack.gateways.values(), stack.rng.uniform(0.5, 2.0))


def kill_the_store(stack: Stack) -> None:
    stack.restart_store()


def cut_the_stores_power(stack: Stack) -> None:
    """Cut the append-only file to its synced part, and restart.

    Under everysec the disk is late by then. Half of the time a generator dies with its writes.
    """
    if stack.durability == "everysec":
        stack.machine.freeze_disk()
        time.sleep(stack.rng.uniform(0.0, LATE_SYNC_S))
        if stack.rng.random() < 0.5:
            with contextlib.suppress(InVainError):
                kill_a_generator(stack)
    stack.restart_store(power_off=True)


def put_the_store_to_sleep(stack: Stack) -> None:
    with frozen(stack.rig.server.pid):
        time.sleep(stack.rng.uniform(0.5, 2 * LEASE_S))


def lose_replies_of_the_store(stack: Stack) -> None:
    _cut_replies(stack, stack.store_proxy, within_bytes=400)


def cut_all_connections_to_the_store(stack: Stack) -> None:
    stack.store_proxy.cut_all()


def silence_the_store(stack: Stack) -> None:
    """Keep connections half-open: requests arrive, replies do not, until all are reset."""
    stack.store_proxy.replies.is_silent = True
    time.sleep(stack.rng.uniform(0.5, 2.0))
    stack.store_proxy.replies.is_silent = False
    stack.store_proxy.cut_all()


def slow_the_store_down(stack: Stack) -> None:
    stack.store_proxy.replies.delay_s = stack.rng.uniform(0.01, 0.1)
    time.sleep(2.0)
    stack.store_proxy.replies.delay_s = 0.0


def cut_transfers_to_the_ranks(stack: Stack) -> None:
    _cut_replies(stack, stack.batcher_proxy, within_bytes=4000)


def _cut_replies(stack: Stack, proxy: Proxy, *, within_bytes: int) -> None:
    before = proxy.num_breaks
    proxy.break_replies(stack.rng.randint(0, within_bytes) for _ in range(NUM_CUTS))
    with contextlib.suppress(TimeoutError):
        stack.rig.wait(
            lambda: proxy.num_breaks >= before + NUM_CUTS, "replies to cut", timeout_s=CUT_S
        )
    proxy.break_replies([])
    if proxy.num_breaks == before:
        raise InVainError("no request came")


def fill_the_stores_memory(stack: Stack) -> None:
    memory: Any = stack.rig.client.info("memory")
    before = _num_refused(stack)
    stack.rig.client.config_set("maxmemory", memory["used_memory"])
    time.sleep(2.0)
    num_refused = _num_refused(stack) - before
    stack.rig.client.config_set("maxmemory", memory["maxmemory"])
    if not num_refused:
        raise InVainError("no write was refused")


def _num_refused(stack: Stack) -> int:
    errors: Any = stack.rig.client.info("errorstats")
    return errors.get("errorstat_OOM", {"count": 0})["count"]


def move_the_clock(stack: Stack) -> None:
    """Set the store's clock wrong by up to an hour, under everysec only forward.

    A store whose clock is set back does not sync until the clock has caught up.
    """
    if stack.durability == "everysec":
        stack.clock_s += stack.rng.uniform(0.0, HOUR_S)
    else:
        stack.clock_s = stack.rng.uniform(-HOUR_S, HOUR_S)
    stack.machine.set_clock(wrong_by_s=stack.clock_s)


FAULTS: tuple[Fault, ...] = (
    *(kill_a_batcher, put_a_batcher_to_sleep),
    *(kill_a_rank, put_a_rank_to_sleep),
    *(kill_a_generator, put_a_generator_to_sleep),
    *(kill_the_gateway, put_the_gateway_to_sleep),
    *(kill_the_store, cut_the_stores_power, put_the_store_to_sleep),
    *(lose_replies_of_the_store, cut_all_connections_to_the_store),
    *(silence_the_store, slow_the_store_down, cut_transfers_to_the_ranks),
    *(fill_the_stores_memory, move_the_clock),
)
