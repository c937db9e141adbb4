from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from testkit import manifest, sealed, shape
from turnstream.types import SealedTrajectory
from turnstream_server.jobs.summary import (
    SealedFigures,
    Summary,
    figures_of_sealed,
    numbers_of,
    reward_tenths,
    summarise,
    summary_table,
)


def game(reward: float = 1.0) -> SealedFigures:
    return SealedFigures(reward=reward, num_turns=2, wire_bytes=100, resend_bytes=250)


BATCH = replace(
    numbers_of(manifest("g0", "g1")), num_tokens=60, num_turn_tokens=90, num_positions=80
)


def summary(**changes: object) -> Summary:
    given = summarise(
        num_groups=2,
        sealed=[game(0.0), game(1.0)],
        batches={1: BATCH, 2: BATCH},
        stepped=1,
        ledger={"open": 0, "planned": 4, "committed": 4},
        elapsed_s=3.0,
    )
    return replace(given, **changes)


def test_a_client_that_resends_pays_for_every_shared_token() -> None:
    first = shape(new_prompt=10, response=5)
    second = shape(new_prompt=3, response=5, parent=0, shared=15)

    figures = figures_of_sealed(replace(sealed(turns=(first, second)), num_payload_bytes=200))

    assert figures.num_turns == 2
    assert figures.wire_bytes == 200
    assert figures.resend_bytes == 200 + 4 * 15


@pytest.mark.parametrize(
    ("trajectory", "reward"),
    [
        (sealed(reward=0.5), 0.5),
        (replace(sealed(reward=None), reward_components={"a": 1.0, "b": 2.0}), 3.0),
        (sealed(reward=None, turns=(shape(), shape()), turn_rewards=(1.0, 0.25)), 1.25),
    ],
)
def test_a_reward_is_the_outcome_or_the_sum_of_its_parts(
    trajectory: SealedTrajectory, reward: float
) -> None:
    assert figures_of_sealed(trajectory).reward == reward


def test_numbers_of_a_batch_count_tokens_and_padding() -> None:
    plan = manifest("g0", "g1", step=3)

    numbers = numbers_of(plan)

    assert (numbers.num_groups, numbers.num_rows) == (2, 4)
    assert (numbers.num_tokens, numbers.num_turn_tokens, numbers.num_positions) == (20, 20, 20)
    assert (numbers.padding_share, numbers.merge_ratio) == (0.0, 1.0)


def test_summary_counts_stepped_batches_sent_bytes_and_states() -> None:
    seen = summary()

    assert (seen.batches, seen.steps, seen.sequences) == (2, 1, 4)
    assert seen.merge_ratio == pytest.approx(90 / 60)
    assert seen.padding_share == pytest.approx(20 / 80)
    assert seen.tokens_per_s == pytest.approx(60 / 3)
    assert (seen.groups, seen.turns) == (2, 4)
    assert (seen.wire_bytes, seen.resend_bytes) == (200, 500)
    assert seen.trajectories == 8
    assert seen.ledger == {"planned": 4, "committed": 4}


def test_a_run_in_which_nothing_happened_has_a_summary() -> None:
    empty = summarise(
        num_groups=0, sealed=[], batches={}, stepped=0, ledger={"open": 0}, elapsed_s=0.0
    )

    assert (empty.merge_ratio, empty.padding_share, empty.tokens_per_s) == (0.0, 0.0, 0.0)
    assert (empty.reward_first_tenth, empty.reward_last_tenth) == (None, None)


@pytest.mark.parametrize(
    ("rewards", "tenths"),
    [
        ([0.25], (0.25, 0.25)),
        ([0.0] * 10 + [1.0] * 10, (0.0, 1.0)),
        ([1.0] + [0.0] * 9 + [0.5], (0.5, 0.25)),  # 11 rewards: two of them are a tenth
    ],
)
def test_a_tenth_is_rounded_up(rewards: list[float], tenths: tuple[float, float]) -> None:
    assert reward_tenths(rewards) == tenths


def test_the_json_has_the_documented_keys() -> None:
    written = json.loads(summary().to_json())

    assert list(written) == [
        "groups",
        "trajectories",
        "turns",
        "sequences",
        "batches",
        "steps",
        "merge_ratio",
        "padding_share",
        "wire_bytes",
        "resend_bytes",
        "tokens_per_s",
        "reward_first_tenth",
        "reward_last_tenth",
        "ledger",
    ]
    assert written["ledger"] == {"planned": 4, "committed": 4}


def test_the_table_shows_every_figure() -> None:
    console = Console(width=80, file=io.StringIO(), record=True)

    console.print(summary_table(summary(reward_first_tenth=None), title="a job"))

    text = console.export_text()
    for shown in ("a job", "1.50", "25.0%", "500 (2.50 x)", "ledger: committed", "-"):
        assert shown in text
