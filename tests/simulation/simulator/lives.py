"""A life from a seed: the settings of a run, and its course; then that of its fork."""

from __future__ import annotations

import random
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from simulator.asking import on_the_spot
from simulator.borders import inside
from simulator.courses import Course
from simulator.fates import RUN, Fate, fate, new_life, prompt
from simulator.forks import content, fate_of_fork, fork_holds, life_of_fork
from simulator.laws import Laws, final_states
from simulator.world import World
from turnstream.store.runs import create_run
from turnstream.store.tasks import add_prompts


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
    create_run(on_the_spot(world), RUN, life.config)
    prompts = [prompt(rng, number) for number in range(life.num_prompts)]
    add_prompts(on_the_spot(world), RUN, prompts, first=1)
    courses = [Course(world, life, drawn)]
    courses[0].run()
    if drawn.has_forker and not world.problems:
        courses += _go_on_with_fork(world, courses[0].laws, drawn)
    return Verdict(
        seed=seed,
        problems=tuple(world.problems),
        digest=_digest(world, [course.laws for course in courses]),
        num_steps=world.num_steps,
        lasted_s=world.now_s,
        num_batches=sum(len(course.laws.seen.manifests) for course in courses),
        faults=world.counts,
        states=sum([final_states(course.laws) for course in courses], Counter[str]()),
        refusals=life.history.refusals,
    )


def _go_on_with_fork(world: World, laws: Laws, drawn: Fate) -> Iterator[Course]:
    """Let a fork live, where there is one; what its origin has stays as it is."""
    life = life_of_fork(world, laws.seen)
    if life is None:
        return
    before = content(world, RUN)
    course = Course(world, life, fate_of_fork(drawn))
    for problem in fork_holds(course.laws.seen, laws.seen.life):
        world.blame(problem)
    course.run()
    if content(world, RUN) != before and "cut" not in world.counts:
        world.blame("the origin has changed while its fork went on")
    yield course


def lives(seeds: Iterable[int]) -> Iterator[Verdict]:
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


def _digest(world: World, all_laws: Sequence[Laws]) -> int:
    crc = zlib.crc32(repr((world.num_steps, world.now_s, world.counts)).encode())
    for event_id, record in [each for laws in all_laws for each in laws.seen.events]:
        crc = zlib.crc32(record, zlib.crc32(event_id.encode(), crc))
    return crc
