"""The seed's decisions before a run starts: its length, settings and faults.

Most runs are short: a few groups, and faults for a moment. Nearly every broken guard shows in one
of them. One run in sixteen is long, to reach many batches and a store with many finished groups.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, replace
from functools import partial

from simulator.faults import FaultRates
from simulator.shared_state import SharedState
from turnstream.batching.config import BatchingConfig, GroupFilter
from turnstream.batching.config.rules import changed_settings
from turnstream.errors import InvalidConfigError
from turnstream.store.run.tasks import Prompt
from turnstream_server.batcher.planner.snapshotting import Upkeep

RUN = "simulated"
_LONG = 1 / 16
_OPTIONAL = {"observer": 0.15, "pauser": 0.1, "reviser": 0.25, "reopener": 0.12}
"""Share of the runs that have these processes."""
_CHANGES = 0.5
"""Share of the settings that a revision changes."""
_FILTERS = (
    *((), (), ()),
    (GroupFilter(kind="zero_variance"),),
    (GroupFilter(kind="mean_range", metric="score", low=0.3),),
)
_SHORT_PACE = 0.5
"""Leases, deadlines, sleeps and delays of short runs take so much of those of long ones."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The execution that a seed decides: its faults, and the processes beside one trainer."""

    is_long: bool
    fault_rates: FaultRates
    faults_s: float
    num_batchers: int
    num_generators: int
    optional: frozenset[str]


def draw_schedule(rng: random.Random) -> Schedule:
    is_long = rng.random() < _LONG
    density, pace = (1.0, 1.0) if is_long else (2.0, _SHORT_PACE)
    return Schedule(
        is_long=is_long,
        fault_rates=_fault_rates(rng, density=density, pace=pace),
        faults_s=rng.choice((2.0, 4.0, 10.0) if is_long else (0.5, 1.0, 2.0)),
        num_batchers=2 if is_long else rng.choice((1, 2, 2)),
        num_generators=rng.choice((1, 2, 3, 3) if is_long else (1, 2, 2)),
        optional=frozenset([name for name, share in _OPTIONAL.items() if rng.random() < share]),
    )


def _fault_rates(rng: random.Random, *, density: float, pace: float) -> FaultRates:
    """Draw fault rates; some faults are frequent and others do not occur.

    In a third of the runs only processes fail. The strictest laws apply there: no living process
    loses its work.
    """
    lasting = FaultRates(
        longest_sleep_s=8.0 * pace, longest_delay_s=4.0 * pace, longest_unsynced_s=2.5 * pace
    )

    def often(most: float) -> float:
        return density * rng.choice((0.0, most / 4, most))

    if rng.random() < 1 / 3:
        return replace(
            lasting,
            crash=often(0.01),
            sleep=density * rng.choice((0.005, 0.02)),
            late=0.7,
            repeat=often(0.1),
        )
    return replace(
        lasting,
        crash=often(0.006),
        sleep=often(0.012),
        lose=often(0.05),
        late=rng.choice((0.0, 0.5)),
        stall=often(0.05),
        repeat=often(0.1),
        jump=often(0.0015),
        restart=often(0.003),
        fill=often(0.001),
        cut=often(0.006),
        rot=often(0.2),
    )


def draw_run(rng: random.Random, *, is_long: bool) -> SharedState:
    most_groups, most_evals, pace = (12, 5, 1.0) if is_long else (4, 1, _SHORT_PACE)
    any_config = partial(_config, rng, most_groups=4 if is_long else 2, pace=pace)
    return SharedState(
        run=RUN,
        config=any_config(),
        another_config=lambda before: _another(rng, before, any_config()),
        upkeep=Upkeep(
            snapshot_events=rng.choice((8, 20, 1000)),
            snapshot_steps=rng.choice((1, 2, 64)),
            compact_ended=rng.choice((1, 3, 250)),
        ),
        leader_lease_s=pace * rng.choice((1.0, 2.0)),
        park_after_s=pace / 2,
        max_groups=rng.choice((most_groups // 4, most_groups // 2, most_groups)),
        max_evals=rng.choice((0, most_evals // 2, most_evals)),
        num_prompts=rng.choice((0, 0, 4, 8) if is_long else (0, 2, 3)),
        most_episodes=3 if is_long else 2,
    )


def prompt(rng: random.Random, number: int) -> Prompt:
    num_samples = rng.choice((1, 2, 3))
    return Prompt(
        prompt_uid=f"p{number}",
        payload=b"of %d" % number,
        num_samples=num_samples,
        num_needed=rng.randint(0, num_samples),
    )


def _another(rng: random.Random, before: BatchingConfig, drawn: BatchingConfig) -> BatchingConfig:
    """Return some settings of one config; a deadline of rewards, which evaluations need, stays."""
    names = [each.name for each in changed_settings(before, drawn) if rng.random() < _CHANGES]
    changes = {name: getattr(drawn, name) for name in names}
    if not drawn.reward_deadline_s:
        changes.pop("reward_deadline_s", None)
    try:
        return replace(before, **changes)
    except InvalidConfigError:
        return drawn if drawn.reward_deadline_s or not before.reward_deadline_s else before


def _config(rng: random.Random, *, most_groups: int, pace: float) -> BatchingConfig:
    while True:
        with contextlib.suppress(InvalidConfigError):
            return _any_config(rng, most_groups=most_groups, pace=pace)


def _any_config(rng: random.Random, *, most_groups: int, pace: float) -> BatchingConfig:
    batch_groups = rng.choice((1, max(1, most_groups // 2), most_groups))
    policy = rng.choice(("drop", "train_short", "refill", "refill"))
    masks, errors = rng.random() < 0.4, rng.choice(("drop", "drop", "mask", "keep"))
    return BatchingConfig(
        batch_groups=batch_groups,
        mini_batch_groups=rng.choice((1, batch_groups)),
        estimator=rng.choice(("rloo", "rloo", "rloo", "remax")),
        max_staleness=rng.choice((0, 1, 2)),
        max_open_groups=rng.choice((0, 0, most_groups // 2, most_groups)),
        max_planned_ahead=rng.choice((0, 1)),
        max_age_policy=rng.choice(("keep", "keep", "drop", "mask")),
        selection=rng.choice(("ready_first", "ready_first", "in_order", "oldest_weights")),
        mask_truncated=masks,
        error_trajectories=errors,
        masked_reward=rng.choice(("keep", "leave_out")) if masks or errors == "mask" else "keep",
        group_filters=rng.choice(_FILTERS),
        lease_s=pace * rng.choice((0.6, 1.5, 3.0)),
        takeover_s=pace * rng.choice((0.0, 2.0, 4.0)),
        group_deadline_s=pace * rng.choice((0.0, 2.0, 5.0)),
        reward_deadline_s=pace * rng.choice((0.0, 1.0, 3.0)),
        deadline_policy=policy,
        max_refills=rng.choice((1, 3)) if policy == "refill" else 0,
        refill_fallback=rng.choice(("drop", "train_short")) if policy == "refill" else "drop",
        surplus=rng.choice(("drop", "keep")),
        retain_checkpoints=rng.choice((1, 2)),
        max_bytes=rng.choice((0, 0, batch_groups * 4096, 500_000)),
    )
