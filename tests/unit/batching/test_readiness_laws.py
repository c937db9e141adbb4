from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from testkit import config, sealed
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.readiness import RunFold
from turnstream.types import (
    Event,
    GroupOpened,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
)

CONFIG = config()


def opened(group_id: str = "g0", num_samples: int = 2) -> GroupOpened:
    return GroupOpened(group_id=group_id, prompt_uid=f"uid of {group_id}", num_samples=num_samples)


def abandoned(group_id: str = "g0", sample: int = 0, attempt: int = 0) -> TrajectoryAbandoned:
    return TrajectoryAbandoned(key=TrajectoryKey(group_id, sample, attempt), reason="gave up")


def fold(events: Iterable[Event], of: BatchingConfig = CONFIG) -> tuple[RunFold, list[Any]]:
    """The state after these events, and all that was decided."""
    state = RunFold(of)
    drops = [drop for i, event in enumerate(events) for drop in state.apply(f"{i}-0", event)]
    return state, drops


seeds = st.integers(0, 2**32 - 1)


def stream(rng: np.random.Generator) -> list[Event]:
    """Events of a few groups in any order that a run allows: opened before anything else."""
    lanes: list[list[Event]] = []
    for group_id in ("a", "b", "c")[: rng.integers(1, 4)]:
        num_samples = int(rng.integers(1, 4))
        later = [
            ending(rng, group_id, sample, attempt)
            for sample in range(num_samples)
            for attempt in range(rng.integers(1, 3))
        ]
        if rng.random() < 0.3:
            key = TrajectoryKey(group_id, int(rng.integers(num_samples)), int(rng.integers(2)))
            later.append(TrajectoryDied(key=key, reason="bad checksum"))
        lanes.append(
            [opened(group_id, num_samples), *(later[i] for i in rng.permutation(len(later)))]
        )
    order = rng.permutation([lane for lane, events in enumerate(lanes) for _ in events])
    sources = [iter(lane) for lane in lanes]
    return [next(sources[lane]) for lane in order]


def ending(rng: np.random.Generator, group_id: str, sample: int, attempt: int) -> Event:
    if rng.random() < 0.25:
        return abandoned(group_id, sample, attempt)
    reward = (0.0, 1.0, None)[rng.choice(3, p=[0.45, 0.45, 0.1])]
    return sealed(group_id, sample=sample, attempt=attempt, reward=reward)


def picture(state: RunFold) -> list[tuple[str, list[TrajectoryKey]]]:
    return [(group.group_id, [m.key for m in group.members]) for group in state.ready]


@given(seeds, st.booleans())
def test_events_heard_again_change_nothing(seed: int, filters: bool) -> None:
    rng = np.random.default_rng(seed)
    of = replace(CONFIG, drop_zero_variance=filters)
    events = stream(rng)
    repeated: list[Event] = []
    for event in events:
        repeated.append(event)
        repeated.extend(repeated[i] for i in rng.integers(0, len(repeated), rng.integers(3)))

    once, drops = fold(events, of)
    again, drops_again = fold(repeated, of)

    assert picture(again) == picture(once)
    assert drops_again == drops
