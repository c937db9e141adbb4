"""A job that trains: a folder, a store, a new run, and the processes that work on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis
from rich.console import Console

from turnstream.batching.config import BatchingConfig
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream_server.bus.core.stores import open_store
from turnstream_server.jobs.history import RunHistory
from turnstream_server.jobs.services import store_environment
from turnstream_server.jobs.stack import Stack, job_folder
from turnstream_server.jobs.summary import Summary, summary_table
from turnstream_server.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job in progress: the address of its store, its run, and its processes."""

    url: str
    client: redis.Redis
    run: str
    history: RunHistory
    stack: Stack


@contextlib.contextmanager
def training_job(
    settings: Settings, folder: Path, *, kind: str, config: BatchingConfig
) -> Iterator[Job]:
    """Create a store and a run; the processes that the block starts end with it."""
    run = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    with (
        job_folder(folder, job=kind) as folder,
        open_store(settings.model_copy(update={"data_dir": folder / "store"})) as url,
        connect(url) as client,
        Stack(folder, store_environment(url)) as stack,
    ):
        create_run(client, run, config)
        history = RunHistory(client, run)
        yield Job(url=url, client=client, run=run, history=history, stack=stack)


def report(summary: Summary, console: Console, *, title: str, json_path: Path | None) -> None:
    """Print the summary of a job, and write it as JSON if a path is given."""
    console.print(summary_table(summary, title=title))
    if json_path is not None:
        json_path.write_text(summary.to_json(), encoding="utf-8")
