"""The course of one run: a storm, then calm until its end."""

from __future__ import annotations

from simulator import damage, generators, operators
from simulator.asking import on_the_spot
from simulator.fates import Fate
from simulator.laws import Laws
from simulator.life import Life
from simulator.processes import Process
from simulator.sums import are_evals_open, is_unfinished
from simulator.supervisor import Supervisor, slots, start_operators
from simulator.world import World
from turnstream.store.life import reopen_run, resume_run

_MAX_STEPS = 20_000
_TEND_EVERY = 16
"""Steps between two looks at who died."""
_CALM_S = 600.0
_FINDING_OUT_S = 25.0
"""Longer than a generator sleeps, and then takes to find out that the store lost something."""
_SETTLING_S = 3.0


class Course:
    """Lets one run live.

    Attributes:
        laws: that it must keep.
    """

    def __init__(self, world: World, life: Life, drawn: Fate) -> None:
        self.laws = Laws(world, life)
        self._world, self._life, self._drawn = world, life, drawn
        self._supervisor = Supervisor(world, life, slots(drawn), self._is_over)
        world.rot = lambda: damage.strike(self.laws.seen)
        world.after_step = self._after_step
        world.weather = drawn.weather

    def run(self) -> None:
        """From now on until its end; then everybody is killed."""
        self._supervisor.tend()
        self._pass_storm(start_operators(self._world, self._life, self._drawn))
        self._find_out()
        self._end()
        self._world.end()

    def _is_over(self) -> bool:
        """Unless another session has begun since, as by a call that came late."""
        return self._life.is_ended and self.laws.knows_session

    def _after_step(self) -> None:
        self.laws.check_step()
        if self._world.num_steps % _TEND_EVERY == 0:
            self._supervisor.tend()

    def _pass_storm(self, started: list[Process]) -> None:
        world, life = self._world, self._life
        until_s = world.now_s + self._drawn.storm_s
        world.run_until(lambda: world.now_s >= until_s, max_steps=_MAX_STEPS, until_s=until_s)
        world.calm_down()
        life.is_closing = True
        for process in started:
            if process in world.processes:
                world.kill(process)
        resume_run(on_the_spot(world), life.run)
        reopen_run(on_the_spot(world), life.run)

    def _find_out(self) -> None:
        """A run that is closed takes no group again that was lost."""
        world, life = self._world, self._life
        if "cut" in world.counts:
            until_s = world.now_s + _FINDING_OUT_S
            world.run_until(
                lambda: generators.have_found_out(life), max_steps=_MAX_STEPS, until_s=until_s
            )

    def _end(self) -> None:
        world, life, seen = self._world, self._life, self.laws.seen
        life.is_closed_for_good = True
        world.start("closer", lambda process: operators.closer(process, life))
        has_ended = world.run_until(
            lambda: self._is_over() and not are_evals_open(seen),
            max_steps=_MAX_STEPS,
            until_s=world.now_s + _CALM_S,
        )
        if has_ended and life.num_evals:  # what comes late to one is settled a moment later
            until_s = world.now_s + _SETTLING_S
            world.run_until(lambda: not is_unfinished(seen), max_steps=_MAX_STEPS, until_s=until_s)
        if world.problems:
            return
        if has_ended:
            self.laws.check_end()
        else:
            shown = _shown(world, life.run)
            world.blame(f"P5: {life.run} has not ended after {world.now_s:.0f} s: {shown}")


def _shown(world: World, run: str) -> str:
    """The store's hashes, for whoever looks into a failure."""
    prefix = f"ts:{{{run}}}:".encode()
    shown = {
        name[len(prefix) :].decode(): value
        for name, value in world.store.values.items()
        if name.startswith(prefix) and name.endswith((b"frontier", b"groups", b"counts", b"leader"))
    }
    return repr(shown)
