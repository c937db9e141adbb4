"""A simulated run from a seed: its settings, its execution, and the verdict on it."""

from __future__ import annotations

import multiprocessing
import random
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from simulator.checks.final_checks import states_of
from simulator.checks.run_writes import RunWrites
from simulator.execution import Execution
from simulator.patches import patched
from simulator.schedules import RUN, Schedule, draw_run, draw_schedule, prompt
from simulator.store.clients import direct_client
from simulator.world import World
from turnstream.store.run.runs import create_run
from turnstream.store.run.tasks import add_prompts

_PER_CHUNK = 20


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a simulated run; `digest` is a hash of everything that happened."""

    seed: int
    problems: tuple[str, ...]
    digest: int = 0
    num_steps: int = 0
    num_batches: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    states: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0

    def __str__(self) -> str:
        if not self.problems:
            return (
                f"seed {self.seed}: well, {self.num_batches} batches, {dict(self.states)}, "
                f"digest {self.digest:08x}"
            )
        shown = "\n  ".join(self.problems[:5])
        return f"seed {self.seed}: after {self.num_steps} steps\n  {shown}"


def simulate(seed: int) -> Verdict:
    """Return the verdict on one seed; called within `patches.patched`."""
    rng = random.Random(seed)
    drawn = draw_schedule(rng)
    world = World(rng, drawn.fault_rates)
    try:
        return _simulate_in(world, seed, drawn)
    finally:
        world.end()  # also after a failure: nothing of it reaches the next simulated run


def _simulate_in(world: World, seed: int, drawn: Schedule) -> Verdict:
    rng = world.rng
    shared = draw_run(rng, is_long=drawn.is_long)
    world.store.appends_only = rng.choice((b"everysec", b"everysec", b"always"))
    create_run(direct_client(world), RUN, shared.config)
    prompts = [prompt(rng, number) for number in range(shared.num_prompts)]
    add_prompts(direct_client(world), RUN, prompts, first=1)
    execution = Execution(world, shared, drawn)
    execution.run()
    writes = execution.invariants.writes
    return Verdict(
        seed=seed,
        problems=tuple(world.problems),
        digest=_digest(world, writes),
        num_steps=world.num_steps,
        num_batches=len(writes.manifests),
        faults=world.counts,
        states=Counter(state.partition(":")[0] for state in states_of(writes).values()),
    )


def simulate_all(seeds: Iterable[int]) -> Generator[Verdict]:
    with patched():
        for seed in seeds:
            try:
                began_s = time.process_time()
                verdict = simulate(seed)
                yield replace(verdict, cpu_s=time.process_time() - began_s)
            except Exception as error:  # noqa: BLE001 - a script or the simulation failed: say where
                problem = "".join(traceback.format_exception(error))
                yield Verdict(seed=seed, problems=(problem,))


def _digest(world: World, writes: RunWrites) -> int:
    crc = zlib.crc32(repr((world.num_steps, world.now_s, world.counts)).encode())
    for event_id, record in writes.events:
        crc = zlib.crc32(record, zlib.crc32(event_id.encode(), crc))
    return crc


def simulate_parallel(
    seeds: range, *, num_processes: int, per_chunk: int = _PER_CHUNK
) -> Generator[Verdict]:
    chunks = [seeds[at : at + per_chunk] for at in range(0, len(seeds), per_chunk)]
    num_processes = min(num_processes, len(chunks))
    if num_processes <= 1:
        yield from simulate_all(seeds)
        return
    # Spawned instead of forked, because numpy has threads.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(num_processes, mp_context=context)
    try:
        for verdicts in executor.map(_verdicts, chunks):
            yield from verdicts
    finally:
        executor.shutdown(cancel_futures=True)


def _verdicts(seeds: range) -> list[Verdict]:
    return [*simulate_all(seeds)]
