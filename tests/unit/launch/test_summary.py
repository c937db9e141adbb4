from __future__ import annotations

import io
import json
from dataclasses import fields, replace

import pytest
from rich.console import Console

from testkit import manifest, sealed, shape
from testkit.runs.summaries import make_summary
from turnstream_server.console.summary import Summary, reward_tenths, summary_table
from turnstream_server.ledger.queries.run_facts import numbers_of

TURNS = (
    shape(new_prompt=10, response=5),
    shape(new_prompt=3, response=5, parent=0, shared=15),
)
BATCH = replace(
    numbers_of(manifest("g0", "g1")), num_tokens=60, num_turn_tokens=90, num_positions=80
)


def summary() -> Summary:
    games = [
        replace(sealed(reward=reward, turns=TURNS), num_payload_bytes=100) for reward in (0.0, 1.0)
    ]
    return make_summary(
        ledger={"open": 0, "planned": 4, "committed": 4},
        num_groups=2,
        sealed=games,
        batches=[BATCH],
        planned=2,
        stepped=1,
        elapsed_s=3.0,
    )


def test_numbers_of_a_batch_count_tokens_padding_and_versions() -> None:
    numbers = numbers_of(manifest("g0", "g1", step=3))

    assert (numbers.num_groups, numbers.num_rows) == (2, 4)
    assert (numbers.num_tokens, numbers.num_turn_tokens, numbers.num_positions) == (20, 20, 20)
    assert (numbers.padding_share, numbers.merge_ratio) == (0.0, 1.0)
    for oldest, newest, text in ((None, None, "unknown"), (3, 3, "3"), (3, 5, "3 to 5")):
        shown = replace(BATCH, oldest_version=oldest, newest_version=newest)
        assert dict(shown.rows())["policy versions"] == text


def test_summary_counts_stepped_batches_sent_bytes_and_states() -> None:
    console = Console(width=80, file=io.StringIO(), record=True)

    seen = summary()
    written = json.loads(seen.to_json())
    console.print(summary_table(replace(seen, reward_first_tenth=None), title="a job"))

    assert (seen.batches, seen.steps, seen.sequences) == (2, 1, 4)
    assert seen.merge_ratio == pytest.approx(90 / 60)
    assert seen.padding_share == pytest.approx(20 / 80)
    assert seen.tokens_per_s == pytest.approx(60 / 3)
    assert (seen.groups, seen.turns) == (2, 4)
    assert (seen.wire_bytes, seen.resend_bytes) == (200, 200 + 2 * 4 * 15)
    assert seen.trajectories == 8
    assert seen.ledger == {"planned": 4, "committed": 4}
    assert list(written) == [field.name for field in fields(Summary)]
    assert written["ledger"] == {"planned": 4, "committed": 4}
    text = console.export_text()
    for shown in ("a job", "1.50", "25.0%", "320 (1.60 x)", "ledger: committed", "-"):
        assert shown in text


def test_summary_of_an_empty_run_has_no_rewards() -> None:
    empty = make_summary(ledger={"open": 0}, elapsed_s=0)

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
def test_tenth_is_rounded_up(rewards: list[float], tenths: tuple[float, float]) -> None:
    assert reward_tenths(rewards) == tenths
