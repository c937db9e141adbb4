"""Lives in several processes, which share nothing: a seed is the same life in each of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor

from simulator.lives import Verdict, lives

_PER_CHUNK = 20


def lives_of(
    seeds: range, *, num_processes: int, per_chunk: int = _PER_CHUNK
) -> Generator[Verdict]:
    """How each life went, in the order of the seeds, whichever process lived it."""
    chunks = [seeds[at : at + per_chunk] for at in range(0, len(seeds), per_chunk)]
    num_processes = min(num_processes, len(chunks))
    if num_processes <= 1:
        yield from lives(seeds)
        return
    # Not by fork: numpy has threads.
    started_anew = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(num_processes, mp_context=started_anew)
    try:
        for verdicts in executor.map(_live_through, chunks):
            yield from verdicts
    finally:
        executor.shutdown(cancel_futures=True)


def _live_through(seeds: range) -> list[Verdict]:
    return [*lives(seeds)]
