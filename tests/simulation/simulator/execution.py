"""The execution of one run: with faults, then without until its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulator import damage, generators, operators, services, trainers
from simulator.checks.invariants import Invariants
from simulator.checks.ledger_checks import are_evals_open, is_unfinished
from simulator.processes import Process
from simulator.schedules import Schedule
from simulator.shared_state import SharedState
from simulator.store.clients import direct_client
from simulator.world import World
from turnstream.store.run.runs import reopen_run, resume_run

_TEND_EVERY = 16
"""Steps between two looks at who died."""
_END_S = 600.0
_RESEND_S = 25.0
"""Longer than a generator sleeps, and then takes to find out that the store lost something."""
_SETTLING_S = 3.0
_PATIENCE_S = 0.5
"""Another trainer is started beside one that sleeps or hangs for longer."""
_OPERATORS = {
    "pauser": operators.pauser,
    "reviser": operators.reviser,
    "reopener": operators.reopener,
}
"""Processes that are not started again."""


class Execution:
    """The execution of one simulated run."""

    def __init__(self, world: World, shared: SharedState, drawn: Schedule) -> None:
        self.invariants = Invariants(world, shared)
        self._world, self._shared, self._drawn = world, shared, drawn
        self._slots = _slots(drawn)
        world.rot = lambda: damage.strike(self.invariants.writes)
        world.after_step = self._after_step
        world.fault_rates = drawn.fault_rates

    def run(self) -> None:
        """From now on until its end; then everybody is killed."""
        self._tend()
        self._run_with_faults()
        self._await_resends()
        self._end()
        self._world.end()

    def _is_over(self) -> bool:
        return self._shared.is_ended and self.invariants.knows_session

    def _after_step(self) -> None:
        self.invariants.check_step()
        if self._world.num_steps % _TEND_EVERY == 0:
            self._tend()

    def _run_with_faults(self) -> None:
        world, shared = self._world, self._shared
        started = [
            world.start(name, lambda process, main=main: main(process, shared))
            for name, main in _OPERATORS.items()
            if name in self._drawn.optional
        ]
        world.run_until(lambda: False, longest_s=self._drawn.faults_s)
        world.stop_faults()
        shared.is_closing = True
        for process in started:
            if process in world.processes:
                world.kill(process)
        resume_run(direct_client(world), shared.run)
        reopen_run(direct_client(world), shared.run)

    def _await_resends(self) -> None:
        """A run that is closed takes no group again that was lost."""
        if "cut" in self._world.counts:
            self._world.run_until(self._have_all_resent, longest_s=_RESEND_S)

    def _have_all_resent(self) -> bool:
        """Return whether every living publisher has resent what the store lost."""
        self._shared.generators = [
            each
            for each in self._shared.generators
            if not (each.process.is_over or each.has_resent())
        ]
        return not self._shared.generators

    def _end(self) -> None:
        world, shared, writes = self._world, self._shared, self.invariants.writes
        shared.is_closed_for_good = True
        world.start("closer", lambda process: operators.closer(process, shared))
        has_ended = world.run_until(
            lambda: self._is_over() and not are_evals_open(writes),
            longest_s=_END_S,
        )
        if has_ended and shared.num_evals:  # late events are settled a moment later
            world.run_until(lambda: not is_unfinished(writes), longest_s=_SETTLING_S)
        if world.problems:
            return
        if has_ended:
            self.invariants.check_end()
        else:
            shown = _shown(world, shared.run)
            world.fail(f"P5: {shared.run} has not ended after {world.now_s:.0f} s: {shown}")

    def _tend(self) -> None:
        """Start a process in every slot that needs one."""
        for slot in self._slots:
            process = slot.process
            if process is not None and process.task.done() and not process.is_dead:
                self._look_at_end(slot, process)
            if process is None or process.is_over or self._is_replaced(slot, process):
                self._refill(slot)

    def _look_at_end(self, slot: Slot, process: Process) -> None:
        error = None if process.task.cancelled() else process.task.exception()
        if error is not None:
            self._world.fail(f"{process.name} failed: {error!r}")
        self._world.kill(process)
        slot.start_at_s = self._world.now_s + self._world.rng.random()

    def _is_replaced(self, slot: Slot, process: Process) -> bool:
        """Whether another is started beside one that sleeps or hangs: it comes back as a zombie."""
        back_s = max(process.asleep_until_s, process.hangs_until_s)
        return back_s - self._world.now_s > _PATIENCE_S and slot.name == "trainer"

    def _refill(self, slot: Slot) -> None:
        world = self._world
        if slot.process is not None and slot.process.is_dead and slot.start_at_s < 0:
            slot.start_at_s = world.now_s + world.rng.random() * 2
        is_needed = not self._is_over() or slot.name.startswith("batcher")
        if world.now_s < slot.start_at_s or not is_needed:
            return
        slot.num_starts += 1
        main, shared = slot.main, self._shared
        slot.process = world.start(f"{slot.name}{slot.num_starts}", lambda p: main(p, shared))
        slot.start_at_s = -1.0


def _shown(world: World, run: str) -> str:
    prefix = f"ts:{{{run}}}:".encode()
    shown = {
        name[len(prefix) :].decode(): value
        for name, value in world.store.values.items()
        if name.startswith(prefix) and name.endswith((b"frontier", b"groups", b"counts", b"leader"))
    }
    return repr(shown)


_Main = Callable[[Process, SharedState], Any]


@dataclass
class Slot:
    """A place for a process, which is filled again after it died."""

    name: str
    main: _Main
    process: Process | None = None
    num_starts: int = 0
    start_at_s: float = 0.0


def _slots(drawn: Schedule) -> list[Slot]:
    return [
        *[Slot(f"batcher-{'ab'[n]}", services.batcher) for n in range(drawn.num_batchers)],
        *[Slot(f"generator-{n}-", generators.generator) for n in range(drawn.num_generators)],
        Slot("trainer", trainers.trainer),
        *([Slot("observer", operators.observer)] if "observer" in drawn.optional else []),
        *([Slot("replanner", damage.replanner)] if drawn.fault_rates.rot else []),
    ]
