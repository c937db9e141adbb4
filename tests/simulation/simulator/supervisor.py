"""Who works at a run, and is started again after he died."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from simulator import bystanders, damage, forks, generators, operators, services, trainers
from simulator.fates import Fate
from simulator.life import Life
from simulator.processes import Process
from simulator.world import World

_PATIENCE_S = 0.5
"""Another trainer is started beside one that sleeps or hangs for longer."""

_Main = Callable[[Process, Life], Any]


@dataclass
class Slot:
    """A place for a process, which is filled again after it died."""

    name: str
    main: _Main
    process: Process | None = None
    num_starts: int = 0
    start_at_s: float = 0.0


@dataclass
class Supervisor:
    """Starts processes again."""

    world: World
    life: Life
    slots: list[Slot]
    is_over: Callable[[], bool]

    def tend(self) -> None:
        """Look after every slot."""
        for slot in self.slots:
            process = slot.process
            if process is not None and process.task.done() and not process.is_dead:
                self._look_at_end(slot, process)
            if process is None or process.is_over or self._is_given_up(slot, process):
                self._refill(slot)

    def _look_at_end(self, slot: Slot, process: Process) -> None:
        error = None if process.task.cancelled() else process.task.exception()
        if error is not None:
            self.world.blame(f"{process.name} failed: {error!r}")
        self.world.kill(process)
        slot.start_at_s = self.world.now_s + self.world.rng.random()

    def _is_given_up(self, slot: Slot, process: Process) -> bool:
        """Whether another is started beside one that sleeps or hangs: it comes back as a zombie."""
        back_s = max(process.asleep_until_s, process.hangs_until_s)
        return back_s - self.world.now_s > _PATIENCE_S and slot.name == "trainer"

    def _refill(self, slot: Slot) -> None:
        world = self.world
        if slot.process is not None and slot.process.is_dead and slot.start_at_s < 0:
            slot.start_at_s = world.now_s + world.rng.random() * 2
        is_needed = not self.is_over() or slot.name.startswith("batcher")
        if world.now_s < slot.start_at_s or not is_needed:
            return
        slot.num_starts += 1
        main, life = slot.main, self.life
        slot.process = world.start(f"{slot.name}{slot.num_starts}", lambda p: main(p, life))
        slot.start_at_s = -1.0


def slots(drawn: Fate) -> list[Slot]:
    """Those whom a run needs."""
    return [
        *[Slot(f"batcher-{'ab'[n]}", services.batcher) for n in range(drawn.num_batchers)],
        *[Slot(f"generator-{n}-", generators.generator) for n in range(drawn.num_generators)],
        Slot("trainer", trainers.trainer),
        *[Slot("observer", bystanders.observer) for _ in range(drawn.has_observer)],
        *([Slot("mender", damage.mender)] if drawn.weather.rot else []),
    ]


def start_operators(world: World, life: Life, drawn: Fate) -> list[Process]:
    """Begin those who are not started again; those who are gone with the storm."""
    if drawn.has_forker:
        world.start("forker", lambda process: forks.forker(process, life))
    return [
        world.start(name, lambda process, main=main: main(process, life))
        for name, main in _operators(drawn)
    ]


def _operators(drawn: Fate) -> Iterator[tuple[str, _Main]]:
    if drawn.has_operator:
        yield "operator", operators.pauser
    if drawn.has_reviser:
        yield "reviser", operators.reviser
    if drawn.has_reopener:
        yield "reopener", operators.reopener
