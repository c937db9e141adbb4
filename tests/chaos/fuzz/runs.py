"""Small runs whose rows are known: made in a store, copied to another one, and trained."""

from __future__ import annotations

import itertools
import random
import string
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import redis

import testkit
from turnstream.batching.config import BatchingConfig
from turnstream.errors import TurnstreamError
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream.types import RecoveryToken, Trajectory, Turn
from turnstream.worker import BatchStream

_GROUPS_PER_WRITE = 4
_PATIENCE_S = 120.0

NUM_GROUPS = 3
GROUP_SIZE = 2
AFTER = "after"
"""The group that is written after the damage; a planner that continues trains it."""

CONFIG = BatchingConfig(
    batch_groups=1,
    mini_batch_groups=1,
    estimator="rloo",
    max_staleness=100,
    max_planned_ahead=NUM_GROUPS,
    retain_checkpoints=1,
    lease_s=60.0,
)


class Row(NamedTuple):
    """A row as it must be served: its letters, with trained ones as capitals, and its reward."""

    letters: str
    reward: float


Rows = dict[str, Row]
"""The row of each trajectory of a run."""


@dataclass(slots=True, kw_only=True)
class Trained:
    """The training of one run.

    Attributes:
        rows: trajectory ids and rows, in order.
        num_steps: number of committed steps.
        token: recovery token of the last committed step, or None.
        error: the error that ended training; None at the end of the run.
    """

    rows: list[tuple[str, Row]] = field(default_factory=list[tuple[str, Row]])
    num_steps: int = 0
    token: RecoveryToken | None = None
    error: TurnstreamError | None = None

    @property
    def group_ids(self) -> set[str]:
        """The groups with a served row."""
        return {name.partition("/")[0] for name, _ in self.rows}


def make_run(url: str, name: str, rng: random.Random) -> Rows:
    """Create a run, and publish its groups."""
    with connect(url) as client:
        create_run(client, name, CONFIG)
    return publish(url, name, [f"g{i}" for i in range(NUM_GROUPS)], rng)


def publish(url: str, run: str, group_ids: list[str], rng: random.Random) -> Rows:
    """Publish groups of random letters; return their rows."""
    rows: Rows = {}
    with Publisher(url, run) as publisher:
        for group_id in group_ids:
            members: list[Trajectory] = []
            for sample in range(GROUP_SIZE):
                turns, letters = _turns(rng)
                reward = float(sample) + rng.randrange(100) / 4
                members.append(testkit.trajectory(*turns, sample=sample, reward=reward))
                rows[f"{group_id}/{sample}/0"] = Row(letters, reward)
            publisher.publish(testkit.group(group_id, *members)).result(30)
    return rows


def _turns(rng: random.Random) -> tuple[list[Turn], str]:
    """Return two turns of which the second continues the first, and the row that they make."""
    letters = _word(rng, 2, 6)
    turns = []
    for observed in (_word(rng, 0, 3), ""):
        response = _word(rng, 1, 5).upper()
        turns.append(testkit.turn(letters, response, logprobs=-0.5, version=0))
        letters += response + observed
    return turns, letters


def _word(rng: random.Random, least: int, most: int) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(least, most)))


def copy_run(source: redis.Redis, target: redis.Redis, name: str) -> None:
    """Copy all keys of a run to another store, where no batcher leads it yet."""
    found = run_keys_of(source, name)
    with source.pipeline(transaction=True) as pipeline:
        for key in found:
            pipeline.dump(key)
        dumps: Any = pipeline.execute()
    for key, dump in zip(found, dumps, strict=True):
        if dump is not None:  # a key may be deleted after the list of keys was read
            target.restore(key, 0, dump, replace=True)
    leader = keys.run_keys(name).leader
    if target.exists(leader):
        target.hset(leader, "expires_ms", 0)


def run_keys_of(client: redis.Redis, name: str) -> list[bytes]:
    """Return all keys of a run and of its trajectories."""
    found: Any = [*client.keys(f"ts:{{{name}}}*"), *client.keys(f"ts:{{{name}/*")]
    return sorted(found)


def train(
    target: str,
    run: str,
    *,
    timeout_s: float,
    max_steps: int = 1_000,
    token: RecoveryToken | None = None,
) -> Trained:
    """Train a run until it ends, or until an error."""
    trained = Trained(token=token)
    try:
        with BatchStream(target, run, recovery_token=token, timeout_s=timeout_s) as stream:
            for mini_batch in stream:
                trained.rows += _rows_of(mini_batch)
                if mini_batch.is_last:
                    trained.token = stream.stepped()
                    stream.committed(trained.token)
                    trained.num_steps += 1
                if trained.num_steps == max_steps:
                    break
    except TurnstreamError as error:
        trained.error = error
    return trained


def _rows_of(mini_batch: Any) -> list[tuple[str, Row]]:
    rows = mini_batch.rows
    found = zip(rows.trajectory_id, testkit.spell(rows), rows.reward, rows.is_padding, strict=True)
    return [
        (str(name), Row(letters, float(reward)))
        for name, letters, reward, is_padding in found
        if not is_padding
    ]


def wrong_rows(rows: Rows, trained: Trained, *, checks_reward: bool) -> list[str]:
    """Return one sentence for each served row that is unknown, changed or a repeat."""
    problems, seen = [], set[str]()
    for name, row in trained.rows:
        expected = rows.get(name)
        if expected is None:
            problems.append(f"{name} was served, and no generator wrote it")
        elif row.letters != expected.letters:
            problems.append(f"{name} was served as {row.letters!r}, not {expected.letters!r}")
        elif checks_reward and row.reward != expected.reward:
            problems.append(f"{name} was served with reward {row.reward}, not {expected.reward}")
        if name in seen:
            problems.append(f"{name} was served twice")
        seen.add(name)
    return problems


class HealthyRun:
    """A generator and a trainer of one run in threads; a context manager.

    Attributes:
        steps_s: time of each step, in seconds of the monotonic clock.
        error: the error that ended a thread, or None.
    """

    def __init__(self, url: str, target: str, name: str) -> None:
        self.steps_s: list[float] = []
        self.error: BaseException | None = None
        self._url = url
        self._target = target
        self._name = name
        self._stops = threading.Event()
        self._threads = [
            threading.Thread(target=self._watched, args=(work,), name=f"healthy-{number}")
            for number, work in enumerate((self._generate, self._train))
        ]

    def __enter__(self) -> Self:
        with connect(self._url) as client:
            create_run(client, self._name, CONFIG)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stops.set()
        for thread in self._threads:
            thread.join()

    def longest_gap_s(self, start_s: float, stop_s: float) -> float:
        """Return the longest time between two steps."""
        between = [at_s for at_s in list(self.steps_s) if start_s <= at_s < stop_s]
        times = [start_s, *between, stop_s]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def _watched(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.error = error
            raise

    def _generate(self) -> None:
        rng, number = random.Random(self._name), 0
        while not self._stops.is_set():
            group_ids = [f"h{number + i}" for i in range(_GROUPS_PER_WRITE)]
            publish(self._url, self._name, group_ids, rng)
            number += _GROUPS_PER_WRITE
            while number - len(self.steps_s) > 20 and not self._stops.wait(0.01):
                pass

    def _train(self) -> None:
        with BatchStream(self._target, self._name, timeout_s=_PATIENCE_S) as stream:
            for mini_batch in stream:
                if mini_batch.is_last:
                    stream.committed(stream.stepped())
                    self.steps_s.append(time.monotonic())
                if self._stops.is_set():
                    return
