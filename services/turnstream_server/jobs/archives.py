"""The committed steps of a run as files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from turnstream.store.configs import open_run
from turnstream_server.batcher.archive import archive_step
from turnstream_server.bus.frontier import read_frontier
from turnstream_server.jobs.looks import looking_at


def archive_run(url: str, run: str, folder: Path) -> Iterator[Path]:
    """Write the steps that are committed and still retained; each as soon as it is on disk.

    Raises:
        RunNotFoundError: no such run.
        ReleasedError: a step was released meanwhile.
        DamagedPayloadError: payload of a step is damaged.
        StoreUnavailableError: the store cannot be reached.
        OSError: a file cannot be written.
    """
    with looking_at(url) as client:
        run = open_run(client, run)
        frontier = read_frontier(client, run)
    for step in range(frontier.released + 1, frontier.committed + 1):
        yield archive_step(url, run, step, folder=folder)
