"""Small runs whose rows are known: made in a store and trained."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import testkit
from turnstream.batching.config import BatchingConfig
from turnstream.errors import TurnstreamError
from turnstream.generator import Publisher
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream.types import RecoveryToken, Trajectory, Turn
from turnstream.worker import BatchStream

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
    """The training of one run: its rows in order, its last token, and the error that ended it."""

    rows: list[tuple[str, Row]] = field(default_factory=list[tuple[str, Row]])
    token: RecoveryToken | None = None
    error: TurnstreamError | None = None

    @property
    def group_ids(self) -> set[str]:
        """The groups with a served row."""
        return {name.partition("/")[0] for name, _ in self.rows}


def make_run(url: str, name: str, rng: random.Random) -> Rows:
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


def train(
    target: str,
    run: str,
    *,
    timeout_s: float,
    max_steps: int = 1_000,
    token: RecoveryToken | None = None,
) -> Trained:
    trained = Trained(token=token)
    try:
        with BatchStream(target, run, recovery_token=token, timeout_s=timeout_s) as stream:
            for mini_batch in stream:
                trained.rows += _rows_of(mini_batch)
                if mini_batch.is_last:
                    trained.token = stream.stepped()
                    stream.committed(trained.token)
                    if mini_batch.info.step == max_steps:
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
