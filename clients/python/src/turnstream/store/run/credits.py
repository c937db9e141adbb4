"""The number of groups of a run that may start now, with the reason if none may.

A credit is no claim. The script that opens a group applies the same rule
(store/run/lua/open_group.lua), so a reader that dies holds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import redis

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.capacity import admitting_step, capacity, most_live_groups
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import find_run, no_such_run
from turnstream.store.run.configs import read_config

CREDIT_FIELDS: Final = (
    *("stepped", "live_groups", "open_groups", "closed"),
    *("planned", "planned_groups", "paused", "announced"),
)
"""Fields of the key `frontier` that a credit follows from."""


class CreditReason(StrEnum):
    """Why no group may start now."""

    CLOSED = "closed"
    PAUSED = "paused"
    STALENESS = "staleness"
    ANNOUNCEMENT = "announcement"
    OPEN_GROUPS = "open_groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The number of groups that may start now; their bytes must also fit into the budget.

    Attributes:
        most: groups that may be live after the last step.
        reason: None while a group may start.
        sentence: for people.
    """

    num_groups: int
    most: int
    reason: CreditReason | None
    sentence: str


def credit(client: redis.Redis, run: str) -> Credit:
    """Return how many groups of a run may start now."""
    run = find_run(client, run)
    _, config = read_config(client, run)
    with translating():
        found: Any = client.hmget(keys.run_keys(run).frontier, [*CREDIT_FIELDS])
    stepped, live, opened, closed, planned, planned_groups, paused, announced = found
    if stepped is None:
        raise no_such_run(run)
    return credit_of(
        config,
        stepped=int(stepped),
        announced=None if announced is None else int(announced),
        num_live=int(live),
        num_open=int(opened or 0),
        is_closed=closed == b"1",
        num_revised=int(planned_groups or 0) - int(planned or 0) * config.batch_groups,
        paused=None if paused is None else paused.decode(),
    )


def credit_of(
    config: BatchingConfig,
    *,
    stepped: int,
    announced: int | None = None,
    num_live: int,
    num_open: int,
    is_closed: bool,
    num_revised: int = 0,
    paused: str | None = None,
) -> Credit:
    """Return the credit from the numbers of a run.

    >>> config = BatchingConfig(batch_groups=2, mini_batch_groups=2, max_open_groups=3)
    >>> credit_of(config, stepped=1, num_live=4, num_open=1, is_closed=False).sentence
    '2 groups may start: 4 of 6 are live after step 1, 1 of 3 are open'
    """
    trained = admitting_step(stepped, announced, max_staleness=config.max_staleness)
    most = most_live_groups(
        trained,
        batch_groups=config.batch_groups,
        max_staleness=config.max_staleness,
        num_revised=num_revised,
    )
    most_open = config.max_open_groups
    num_groups = capacity(
        most, num_decided=num_live - num_open, num_open=num_open, max_open=most_open
    )
    reason = None
    if is_closed:
        reason, sentence = CreditReason.CLOSED, "the run takes no new group"
    elif paused is not None:
        reason, sentence = CreditReason.PAUSED, f"the run is paused: {paused}".removesuffix(": ")
    elif num_live >= most:
        reason = CreditReason.STALENESS
        sentence = f"{num_live} groups are live, {most} are allowed after step {trained}"
        if trained < stepped:
            reason = CreditReason.ANNOUNCEMENT
            sentence += f"; step {stepped} is stepped, and its weights are not announced"
    elif not num_groups:
        reason = CreditReason.OPEN_GROUPS
        sentence = f"{num_open} groups are open, max_open_groups is {most_open}"
    else:
        sentence = (
            f"{num_groups} groups may start: {num_live} of {most} are live after step {trained}"
        )
        sentence += f", {num_open} of {most_open} are open" if most_open else ""
    return Credit(
        num_groups=0 if reason else num_groups,
        most=most,
        reason=reason,
        sentence=sentence,
    )
