"""A life from a seed: the settings of a run, its processes, a storm, then calm until its end."""

from __future__ import annotations

import random
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from simulator import bystanders, damage, generators, services, trainers
from simulator.borders import inside
from simulator.clients import SyncClient
from simulator.fates import RUN, Fate, fate, new_life, prompt
from simulator.laws import Laws, final_states
from simulator.life import Life
from simulator.processes import Process
from simulator.sums import are_evals_open, is_unfinished
from simulator.world import World
from turnstream.store.life import resume_run
from turnstream.store.runs import create_run
from turnstream.store.tasks import add_prompts

_MAX_STEPS = 20_000
_TEND_EVERY = 16
"""Steps between two looks at who died."""
_PATIENCE_S = 0.5
"""Another trainer is started beside one that sleeps or hangs for longer."""
_CALM_S = 600.0
_FINDING_OUT_S = 25.0
"""Longer than a generator sleeps, and then takes to find out that the store lost something."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a life went.

    Attributes:
        problems: what must not have happened; empty where all went well.
        digest: of everything that happened: the same seed gives the same.
    """

    seed: int
    problems: tuple[str, ...]
    digest: int
    num_steps: int
    lasted_s: float
    num_batches: int
    faults: dict[str, int]
    states: Counter[str]
    refusals: dict[str, int]
    cpu_s: float = 0.0

    def __str__(self) -> str:
        if not self.problems:
            return (
                f"seed {self.seed}: well, {self.num_batches} batches, {dict(self.states)}, "
                f"digest {self.digest:08x}"
            )
        shown = "\n  ".join(self.problems[:5])
        return f"seed {self.seed}: after {self.num_steps} steps\n  {shown}"


@dataclass
class _Slot:
    """A place for a process, which is filled again after it died."""

    name: str
    main: Callable[[Process, Life], Any]
    process: Process | None = None
    num_starts: int = 0
    start_at_s: float = 0.0


@dataclass
class _Supervisor:
    """Starts processes again."""

    world: World
    life: Life
    slots: list[_Slot]
    is_over: Callable[[], bool]

    def tend(self) -> None:
        """Look after every slot."""
        for slot in self.slots:
            process = slot.process
            if process is not None and process.task.done() and not process.is_dead:
                self._look_at_end(slot, process)
            if process is None or process.is_over or self._is_given_up(slot, process):
                self._refill(slot)

    def _look_at_end(self, slot: _Slot, process: Process) -> None:
        error = None if process.task.cancelled() else process.task.exception()
        if error is not None:
            self.world.blame(f"{process.name} failed: {error!r}")
        self.world.kill(process)
        slot.start_at_s = self.world.now_s + self.world.rng.random()

    def _is_given_up(self, slot: _Slot, process: Process) -> bool:
        """Whether another is started beside one that sleeps or hangs: it comes back as a zombie."""
        back_s = max(process.asleep_until_s, process.hangs_until_s)
        return back_s - self.world.now_s > _PATIENCE_S and slot.name == "trainer"

    def _refill(self, slot: _Slot) -> None:
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


def live(seed: int) -> Verdict:
    """Live through a seed. Within `borders.inside`."""
    rng = random.Random(seed)
    drawn = fate(rng)
    world = World(rng, drawn.weather)
    try:
        return _live_in(world, seed, drawn)
    finally:
        world.end()  # also after a failure: nothing of it runs into the next life


def _live_in(world: World, seed: int, drawn: Fate) -> Verdict:
    rng = world.rng
    life = new_life(rng, is_long=drawn.is_long)
    world.store.appends_only = rng.choice((b"everysec", b"everysec", b"always"))
    create_run(SyncRun(world), RUN, life.config)  # type: ignore[arg-type]
    prompts = [prompt(rng, number) for number in range(life.num_prompts)]
    add_prompts(SyncRun(world), RUN, prompts, first=1)  # type: ignore[arg-type]
    laws = Laws(world, life)
    world.rot = lambda: damage.strike(laws.seen)

    def is_over() -> bool:
        """Unless another session has begun since, as by a call that came late."""
        return life.is_ended and laws.knows_session

    supervisor = _Supervisor(world, life, _slots(drawn), is_over)

    def after_step() -> None:
        laws.check_step()
        if world.num_steps % _TEND_EVERY == 0:
            supervisor.tend()

    world.after_step = after_step
    supervisor.tend()
    if drawn.has_operator:
        world.start("operator", lambda process: bystanders.operator(process, life))
    storm_s = drawn.storm_s
    world.run_until(lambda: world.now_s >= storm_s, max_steps=_MAX_STEPS, until_s=storm_s)
    world.calm_down()
    life.is_closing = True
    resume_run(SyncRun(world), RUN)  # type: ignore[arg-type]
    if "cut" in world.counts:  # a run that is closed takes no group again that was lost
        storm_s += _FINDING_OUT_S
        world.run_until(
            lambda: generators.have_found_out(life), max_steps=_MAX_STEPS, until_s=storm_s
        )
    world.start("closer", lambda process: generators.closer(process, life))
    has_ended = world.run_until(
        lambda: is_over() and not are_evals_open(laws.seen),
        max_steps=_MAX_STEPS,
        until_s=storm_s + _CALM_S,
    )
    if has_ended and life.num_evals:  # what comes late to an evaluation is settled a moment later
        world.run_until(
            lambda: not is_unfinished(laws.seen), max_steps=_MAX_STEPS, until_s=world.now_s + 3.0
        )
    if not world.problems:
        if has_ended:
            laws.check_end()
        else:
            world.blame(f"P5: the run has not ended after {world.now_s:.0f} s: {_shown(world)}")
    states = final_states(laws)
    world.end()
    return Verdict(
        seed=seed,
        problems=tuple(world.problems),
        digest=_digest(world, laws),
        num_steps=world.num_steps,
        lasted_s=world.now_s,
        num_batches=len(laws.seen.manifests),
        faults=world.counts,
        states=states,
        refusals=life.history.refusals,
    )


def _slots(drawn: Fate) -> list[_Slot]:
    return [
        *[_Slot(f"batcher-{'ab'[n]}", services.batcher) for n in range(drawn.num_batchers)],
        *[_Slot(f"generator-{n}-", generators.generator) for n in range(drawn.num_generators)],
        _Slot("trainer", trainers.trainer),
        *[_Slot("observer", bystanders.observer) for _ in range(drawn.has_observer)],
        *([_Slot("mender", damage.mender)] if drawn.weather.rot else []),
    ]


def lives(seeds: range) -> Iterator[Verdict]:
    """Live through many."""
    with inside():
        for seed in seeds:
            try:
                began_s = time.process_time()
                verdict = live(seed)
                yield replace(verdict, cpu_s=time.process_time() - began_s)
            except Exception as error:  # noqa: BLE001 - a script or the simulation failed: say where
                yield _failed(seed, "".join(traceback.format_exception(error)))


def _failed(seed: int, problem: str) -> Verdict:
    return Verdict(
        seed=seed,
        problems=(problem,),
        digest=0,
        num_steps=0,
        lasted_s=0.0,
        num_batches=0,
        faults={},
        states=Counter(),
        refusals={},
    )


class SyncRun(SyncClient):
    """A client of the world's store outside of any process."""

    def __init__(self, world: World) -> None:
        super().__init__(None, world.store)

    def sadd(self, key: str, *members: str) -> Any:
        """Add to a set."""
        return self.execute_command("SADD", key, *members)


def _digest(world: World, laws: Laws) -> int:
    crc = zlib.crc32(repr((world.num_steps, world.now_s, world.counts)).encode())
    for event_id, record in laws.seen.events:
        crc = zlib.crc32(record, zlib.crc32(event_id.encode(), crc))
    return crc


def _shown(world: World) -> str:
    """The store's hashes, for whoever looks into a failure."""
    prefix = f"ts:{{{RUN}}}:".encode()
    shown = {
        name[len(prefix) :].decode(): value
        for name, value in world.store.values.items()
        if name.startswith(prefix) and name.endswith((b"frontier", b"groups", b"counts", b"leader"))
    }
    return repr(shown)
