from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from testkit import sealed
from testkit.planning import plan, ready
from testkit.strategies.values import labelled
from turnstream.batching.scoring.tag_statistics import MAX_METRICS, MAX_TAGS, MAX_VALUES, sum_up
from turnstream.records.manifests import encode_manifest, manifest_hash
from turnstream.types import Figures, MetricStatistics, TagStatistics, ValueStatistics


def of_metrics(*values: dict[str, float]) -> Figures:
    return sum_up((sealed(metrics=each), None) for each in values)


def of_tags(*values: tuple[dict[str, str], float | None]) -> Figures:
    return sum_up((sealed(tags=tags), reward) for tags, reward in values)


def test_metric_has_mean_and_extremes_of_its_trajectories() -> None:
    figures = of_metrics({"turns": 2.0, "cost": 0.5}, {}, {"turns": -4.0})

    assert figures.metrics == {
        "cost": MetricStatistics(num_trajectories=1, total=0.5, minimum=0.5, maximum=0.5),
        "turns": MetricStatistics(num_trajectories=2, total=-2.0, minimum=-4.0, maximum=2.0),
    }
    assert figures.metrics["turns"].mean == -1.0
    assert list(figures.metrics) == ["cost", "turns"]


def test_tag_value_has_its_count_and_mean_reward() -> None:
    figures = of_tags(
        ({"env": "maze"}, 1.0), ({"env": "maze"}, 0.0), ({"env": "go"}, None), ({}, 9)
    )

    assert figures.tags == {
        "env": TagStatistics(
            values={
                "go": ValueStatistics(num_trajectories=1, num_rewarded=0, reward_total=0.0),
                "maze": ValueStatistics(num_trajectories=2, num_rewarded=2, reward_total=1.0),
            }
        )
    }
    means = [each.reward_mean for each in figures.tags["env"].values.values()]
    assert means == [None, 0.5]


def test_values_beyond_the_limit_are_summed_as_other() -> None:
    many = [({"seed": str(number)}, 1.0) for number in range(MAX_VALUES + 3)]

    seed = of_tags(*many, ({"seed": "0"}, 0.0)).tags["seed"]

    assert set(seed.values) == {str(number) for number in range(MAX_VALUES)}
    assert seed.values["0"].num_trajectories == 2
    assert seed.other == ValueStatistics(num_trajectories=3, num_rewarded=3, reward_total=3.0)


def test_names_beyond_the_limit_are_counted_as_left_out() -> None:
    metrics = of_metrics({f"m{number}": 1.0 for number in range(MAX_METRICS + 2)})
    tags = of_tags(({f"t{number}": "x" for number in range(MAX_TAGS + 1)}, None))

    assert (len(metrics.metrics), metrics.num_left_out) == (MAX_METRICS, 2)
    assert (len(tags.tags), tags.num_left_out) == (MAX_TAGS, 1)


def test_numbers_that_cannot_be_summed_are_left_out() -> None:
    figures = of_metrics({"m": math.nan}, {"m": math.inf}, {"m": -1e31}, {"m": 2.0})

    assert figures.metrics["m"].num_trajectories == 1
    assert figures.num_left_out == 3


@given(given=st.lists(st.tuples(labelled, st.none() | st.floats(-9, 9))), cut=st.integers(0, 9))
def test_figures_of_parts_one_onto_the_other_are_those_of_the_whole(given, cut) -> None:
    first = sum_up(given[:cut])

    assert sum_up(given[cut:], onto=first) == sum_up(given)


def test_plan_sums_the_labels_and_its_hash_covers_them() -> None:
    tags = {"env": "maze"}
    members = [
        sealed(group_id, reward=0.5, tags=tags, metrics={"turns": number})
        for group_id, number in (("a", 2.0), ("b", 4.0))
    ]

    manifest = plan(*[ready(own.key.group_id, own) for own in members])

    assert manifest.figures.metrics["turns"].mean == 3.0
    assert manifest.figures.tags["env"].values["maze"].reward_mean == 0.5
    without = replace(manifest, figures=Figures())
    hashes = {manifest_hash(encode_manifest(each)) for each in (manifest, without)}
    assert len(hashes) == 2
