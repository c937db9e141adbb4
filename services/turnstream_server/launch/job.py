"""A job that trains: a folder, a store, a new run, and the processes that work on it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import redis
from rich.console import Console

from turnstream.batching.config import BatchingConfig
from turnstream.errors import InvalidConfigError
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream_server.console.summary import RunHistory, Summary, summary_table
from turnstream_server.launch.stack import Stack
from turnstream_server.ledger.core.stores import open_store
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.settings import Settings

_MARK = ".turnstream-job"
_REFRESH_S = 0.25
_LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job in progress: the address of its store, its run, and its processes."""

    url: str
    client: redis.Redis
    run: str
    history: RunHistory
    stack: Stack

    def watch(
        self,
        console: Console,
        *,
        timeout_s: float,
        goal: Callable[[Summary], float | None] = lambda _: None,
    ) -> Iterator[Summary]:
        """Yield and show the summary at intervals until the deadline; raise if a process fails.

        `goal` is the reward that ends the job.
        """
        with progress_display(console) as show:
            for elapsed_s in self.stack.watch(timeout_s=timeout_s, every_s=_REFRESH_S):
                summary = self.history.summary()
                show(progress_text(summary, elapsed_s=elapsed_s, goal=goal(summary)))
                yield summary


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
        Stack(folder, store_url=url) as stack,
    ):
        create_run(client, run, config)
        history = RunHistory(client, run)
        yield Job(url=url, client=client, run=run, history=history, stack=stack)


def progress_text(summary: Summary, *, elapsed_s: float, goal: float | None = None) -> str:
    """Return the numbers of a job; `goal` is the reward that ends it."""
    minutes, seconds = divmod(int(elapsed_s), 60)
    last = summary.reward_last_tenth
    reward = "-" if last is None else f"{last:.3f}"
    reward += "" if goal is None else f" of {goal:.3f}"
    states = [f"{state} {count:,}" for state, count in summary.ledger.items()]
    return (
        f"{minutes}:{seconds:02}  step {summary.steps}  reward {reward}  "
        f"{summary.tokens_per_s:,.0f} tokens/s  ledger: {', '.join(states) or 'empty'}"
    )


@contextlib.contextmanager
def progress_display(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text in place of the last one.

    Without a terminal it prints one line every ten seconds.
    """
    last_line_s = time.monotonic()
    with console.status("starting") as status:

        def show(text: str) -> None:
            nonlocal last_line_s
            if console.is_terminal:
                status.update(text)
            elif time.monotonic() - last_line_s >= _LINE_EVERY_S:
                last_line_s = time.monotonic()
                console.print(text, soft_wrap=True)

        yield show


@contextlib.contextmanager
def job_folder(folder: Path, *, job: str) -> Iterator[Path]:
    """Lock and empty the folder of a job, made if it is missing; its files stay after the job.

    Raises:
        InvalidConfigError: it is a file, or has other content than an earlier run of this job.
    """
    folder = folder.absolute()
    mark = folder / _MARK
    is_ours = mark.is_file() and mark.read_text(encoding="utf-8").strip() == job
    if not is_ours and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidConfigError("data_dir", f"{folder} has other content than a {job}")
    folder.mkdir(parents=True, exist_ok=True)
    with mark.open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidConfigError("data_dir", f"another {job} is at work in {folder}") from None
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != mark:
                path.unlink()
        lock.truncate(0)
        lock.write(f"{job}\n")
        lock.flush()
        yield folder


def write_policy(folder: Path, policy: SmallModelSpec) -> Path:
    """Write a policy to a file that a command line can name; return its path."""
    path = folder / "policy.json"
    path.write_text(json.dumps(asdict(policy), indent=2) + "\n", encoding="utf-8")
    return path


def report(summary: Summary, console: Console, *, title: str, json_path: Path | None) -> None:
    """Print the summary of a job, and write it as JSON if a path is given."""
    console.print(summary_table(summary, title=title))
    if json_path is not None:
        json_path.write_text(summary.to_json(), encoding="utf-8")
