"""Tags and metrics, summed up."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from testkit.plans import sealed
from testkit.strategies.values import numbers_by_name, rewards_of_trajectories, texts_by_name
from turnstream.batching.scoring.tag_statistics import sum_up

labelled = st.builds(
    lambda tags, metrics: replace(sealed(), tags=tags, metrics=metrics),
    texts_by_name,
    numbers_by_name,
)
"""Trajectories with any tags and metrics."""

figures = st.lists(st.tuples(labelled, st.none() | rewards_of_trajectories), max_size=3).map(sum_up)
"""Statistics of the labels of some trajectories."""
