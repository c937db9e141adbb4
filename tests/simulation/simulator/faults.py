"""The faults of a simulated world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.world import World

_STOPS = 0.3
"""Share of the killed batchers that stop in order instead."""
_LONGEST_FULL_S = 2.0
_JUMPS_MS = (-3_600_000, -5_000, -500, 500, 5_000, 3_600_000)


@dataclass(frozen=True, kw_only=True)
class FaultRates:
    """The rate of each fault per step of the world.

    Attributes:
        crash: a process is killed.
        sleep: a process stops for up to `longest_sleep_s`, and then continues.
        lose: a call, or its reply, is lost together with the connection.
        late: a lost call, or one of a killed process, still arrives up to `longest_delay_s` later.
        stall: the call of a script takes up to `longest_delay_s` to arrive, and its caller waits.
        repeat: a call is carried out twice, as when a client sends it again.
        jump: the clock of the store is set forward or back.
        restart: every connection is lost, and the store forgets the scripts.
        fill: the store is full for a while.
        cut: the power fails, and a store without fsync loses its last writes.
        rot: planned payload is damaged on the disk.
    """

    crash: float = 0.0
    sleep: float = 0.0
    lose: float = 0.0
    late: float = 0.0
    stall: float = 0.0
    repeat: float = 0.0
    jump: float = 0.0
    restart: float = 0.0
    fill: float = 0.0
    cut: float = 0.0
    rot: float = 0.0
    longest_sleep_s: float = 8.0
    longest_delay_s: float = 4.0
    longest_unsynced_s: float = 2.5


NO_FAULTS = FaultRates()


class Faults:
    """Lets things go wrong in one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._full_until_s = 0.0
        self._on_disk: Any = None
        self._cut_at_s = 0.0
        self._restore: Callable[[], None] = lambda: None
        fault_rates = world.fault_rates
        self._by_chance: tuple[tuple[float, Callable[[], None]], ...] = (
            (fault_rates.crash, self._crash_one),
            (fault_rates.sleep, self._put_one_to_sleep),
            (fault_rates.jump, self._set_clock_wrong),
            (fault_rates.restart, self._restart_store),
            (fault_rates.fill, self._fill_store),
            (fault_rates.cut, self._sync_for_the_last_time),
            (fault_rates.rot, lambda: world.rot()),
        )
        self._all_chances = sum(chance for chance, _ in self._by_chance)

    def maybe_happen(self) -> None:
        """One of them, or none, by chance."""
        world = self._world
        if self._on_disk is not None and world.now_s >= self._cut_at_s:
            self._cut_power()
        chance = world.rng.random()
        if chance < self._all_chances:
            for share, happen in self._by_chance:
                if chance < share:
                    happen()
                    return
                chance -= share
        if world.store.is_full and world.now_s >= self._full_until_s:
            world.store.is_full = False

    def end(self) -> None:
        """End all faults; a pending power cut happens now."""
        self._world.store.is_full = False
        if self._on_disk is not None:
            self._cut_power()

    def _crash_one(self) -> None:
        world = self._world
        living = [each for each in world.processes if not each.is_over]
        if living:
            process = world.rng.choice(living)
            if process.name.startswith("batcher") and world.rng.random() < _STOPS:
                world.note("stop")
                process.task.cancel()  # as SIGTERM does; it may sleep before it ends in order
                return
            world.note("crash")
            world.died.add(process.name)
            world.kill(process)

    def _put_one_to_sleep(self) -> None:
        world = self._world
        if world.processes:
            world.note("sleep")
            process = world.rng.choice(world.processes)
            process.asleep_until_s = (
                world.now_s + world.rng.random() * world.fault_rates.longest_sleep_s
            )
            process.loop.call_at(process.asleep_until_s, lambda: None)

    def _set_clock_wrong(self) -> None:
        world = self._world
        world.note("jump")
        world.set_clock(ahead_ms=world.clock_ahead_ms + world.rng.choice(_JUMPS_MS))

    def _restart_store(self) -> None:
        self._world.note("restart")
        self._world.lose_connections()
        self._world.store.start_anew()

    def _sync_for_the_last_time(self) -> None:
        world = self._world
        if self._on_disk is None and world.store.appends_only == b"everysec":
            self._on_disk = world.store.save()
            self._cut_at_s = world.now_s + world.rng.random() * world.fault_rates.longest_unsynced_s
            self._restore = world.synced()

    def _cut_power(self) -> None:
        world = self._world
        world.note("cut")
        world.lose_connections()
        world.store.load(self._on_disk)
        self._on_disk = None
        self._restore()

    def _fill_store(self) -> None:
        world = self._world
        world.note("fill")
        world.store.is_full = True
        self._full_until_s = world.now_s + world.rng.random() * _LONGEST_FULL_S
