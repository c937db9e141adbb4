"""The batching core against loops over lists, and against a plain copy of the bytes it writes.

    make bench                                  # after the whole path
    python benchmarks/batching.py --tiny        # sees that it works

CPU time of one thread, the least of several rounds. Every job is held to four baselines:

    loop    the job over Python lists, row by row and turn by turn, as trainers had it before they
            vectorised it (benchmarks/loops.py): it gets lists, and makes arrays at the end
    new     np.copyto of as many bytes as the job writes, into an np.empty of their own. The goal is
            held to this one: a batch goes into new memory too, with page faults where the
            allocator asks the system for it (above 32 MB), and without where it does not
    warm    the same copy into memory that was written before: never a page fault
    limit   numpy calls alone, one per row and column, with everything known before
            (benchmarks/limits.py): what a job over many short rows can be held to. Where this
            alone is above 2 times the copy, the goal of 2 cannot be reached row by row; the end of
            the report says where, and by how much
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import limits
import loops
import numpy as np
from rollouts import (
    Lists,
    as_lists,
    lengths_of,
    make_rows,
    make_sequences,
    make_trajectories,
    rows_from_lists,
    turns_as_lists,
)
from table import Line, Table, least_ms

from turnstream.batching.layouts.jagged import jagged
from turnstream.batching.layouts.packed import packed
from turnstream.batching.layouts.padded import left_padded, right_padded
from turnstream.batching.layouts.sft import (
    bin_sequences,
    packed_supervised,
    supervised_rows,
)
from turnstream.batching.merge.columns import merged_turns, token_columns
from turnstream.batching.merge.merging import plan_sequences, store_turns
from turnstream.types import NO_PARENT, Ragged, Rows, StoredTurn, StoredTurns, Turn

COLLATION_GOAL, COPY_GOAL = 30.0, 2.0
BREAKS = (
    "none",
    *[
        f"{when}{where}"
        for where in ("", ", late", ", inside")
        for when in ("turn 4", "every turn")
    ],
)


# ------------------------------------------------------------------------------ collation


def measure_collation(table: Table, *, num_rows: int, loop_rounds: int) -> None:
    """Left-padded rectangles in the three workloads, and the other layouts of the middle one."""
    for workload in ("short", "2.8 M tokens", "15.7 M tokens"):
        rows = make_rows(*lengths_of(workload, num_rows))
        lists = as_lists(rows)
        columns = (lists.prompts, lists.responses, lists.rewards, lists.masks, lists.logprobs)
        loop_ms = least_ms(lambda columns=columns: loops.left_padded(*columns), rounds=loop_rounds)

        pad = _padding(rows)

        def pad_lists(rows: Rows = rows, lists: Lists = lists) -> Any:
            return _padding(rows_from_lists(rows, lists))()

        name = f"left padded, {workload}"
        limit = limits.right_aligned(
            [
                (rows.input_ids, np.int64),
                (rows.loss_mask, np.uint8),
                (rows.rewards, np.float32),
                (rows.logprobs or rows.rewards, np.float32),
            ]
        )
        table.add(f"{name}, from buffers", pad, loop_ms=loop_ms, goal=COLLATION_GOAL, limit=limit)
        table.add(f"{name}, from lists", pad_lists, loop_ms=loop_ms)
        del lists, columns, pad_lists
        if workload == "2.8 M tokens":
            measure_other_layouts(table, rows)


def measure_other_layouts(table: Table, rows: Rows) -> None:
    """The layouts that no loop stands for."""
    width, nan = int(rows.input_ids.lengths.max()), float("nan")
    bins = [list(range(k, len(rows), 8)) for k in range(8)]
    table.add(
        "right padded, 2.8 M tokens",
        lambda: right_padded(rows, width=width, pad_token_id=0),
        loop_ms=nan,
    )
    table.add(
        "packed in 8 bins, 2.8 M tokens",
        lambda: packed(rows, bins=bins, pad_token_id=0),
        loop_ms=nan,
    )
    table.add("jagged, 2.8 M tokens", lambda: jagged(rows), loop_ms=nan)


# ------------------------------------------------------------------------------ packed


def measure_packing(table: Table, *, num_rows: int, loop_rounds: int) -> None:
    """Supervised sequences in bins of 8,192 tokens for 8 ranks, packing included."""
    for low, high in ((100, 700), (256, 5000)):
        ids, weights = make_sequences(low, high, num_rows)
        as_ids, as_weights = ([row.tolist() for row in column] for column in (ids, weights))
        loop_ms = least_ms(
            lambda ids=as_ids, weights=as_weights: loops.packed_supervised(
                ids, weights, capacity=8192, dp_world_size=8
            ),
            rounds=loop_rounds,
        )

        rows = supervised_rows(ids, weights)

        def ours(rows: Rows = rows) -> Any:
            lengths = rows.input_ids.lengths.tolist()
            bins = bin_sequences(lengths, capacity=8192, dp_world_size=8)
            return packed_supervised(rows, bins=bins, pad_token_id=0)

        def from_lists(ids: Any = as_ids, weights: Any = as_weights, ours: Any = ours) -> Any:
            columns = Ragged.from_rows(ids, np.int32), Ragged.from_rows(weights, np.float32)
            return ours(supervised_rows(*columns))

        name = f"packed supervised, U[{low},{high}]"
        bins = bin_sequences(rows.input_ids.lengths.tolist(), capacity=8192, dp_world_size=8)
        columns = [(ids, np.int64), (ids, np.int64), (weights, np.float32)]
        table.add(
            f"{name}, from buffers",
            ours,
            loop_ms=loop_ms,
            goal=COLLATION_GOAL,
            limit=limits.in_bins(columns, bins),
        )
        table.add(f"{name}, from lists", from_lists, loop_ms=loop_ms)


# ------------------------------------------------------------------------------ merging


def measure_merging(table: Table, *, num_trajectories: int, loop_rounds: int) -> None:
    """Measure turns into rows: from whole prompts, as the generator and the batcher do it together.

    The batcher's part is a line of its own: from turns as the store has them.
    """
    for size in ("short", "long"):
        for breaks in BREAKS:
            turns = make_trajectories(size, breaks=breaks, num_trajectories=num_trajectories)
            lists = turns_as_lists(turns)
            loop_ms = least_ms(lambda lists=lists: loops.merge(lists), rounds=loop_rounds)
            bare_ms = least_ms(lambda lists=lists: loops.merge_lists(lists), rounds=loop_rounds)
            del lists
            table.add(
                f"merge {size}, breaks: {breaks}",
                lambda turns=turns: _merged(turns),
                loop_ms=loop_ms,
            )
            print(f"{'  of the loop, without making arrays':50} {bare_ms:8.1f}")
            stored = [store_turns(own) for own in turns]
            limit = limits.merged(stored)
            table.add("  stored turns to columns", _assembly(stored), loop_ms=loop_ms, limit=limit)


def _merged(turns: list[list[Turn]]) -> Any:
    """Cut the turns as the generator does, then make the columns of all as the batcher does."""
    return _assembly([store_turns(own) for own in turns])()


def _assembly(stored: list[list[StoredTurn]]) -> Callable[[], Any]:
    firsts = [*itertools.accumulate([len(own) for own in stored], initial=0)]
    rows = [
        [first + turn for turn in row.turns]
        for first, own in zip(firsts, stored, strict=False)
        for row in plan_sequences([turn.shape for turn in own], merge=True)
    ]
    parents = [
        turn.parent_turn if turn.parent_turn == NO_PARENT else first + turn.parent_turn
        for first, own in zip(firsts, stored, strict=False)
        for turn in own
    ]

    def assemble() -> Any:
        turns = StoredTurns.of(itertools.chain.from_iterable(stored))
        return token_columns(merged_turns(turns._replace(parent_turn=parents), rows))

    return assemble


# ------------------------------------------------------------------------------ growth


def measure_growth(*, num_rows: int, rounds: int) -> list[dict[str, Any]]:
    """CPU nanoseconds per token, at 1 and at 8 times the work: no more, if the cost is linear.

    Turns with whole prompts: per token of all prompts and responses, of which there are 45 times
    as many in 8 times the turns. Stored turns and rows: per token stored.
    """
    found: list[dict[str, Any]] = []
    print("\nCPU nanoseconds per token, as the work grows")

    def add(job: str, unit: str, jobs: dict[int, tuple[Callable[[], Any], int]]) -> None:
        each = {
            count: least_ms(run, rounds=rounds) * 1e6 / tokens
            for count, (run, tokens) in jobs.items()
        }
        ratio = each[max(each)] / each[min(each)]
        found.append({"job": job, "unit": unit, "ns_per_token": each, "ratio": ratio})
        points = "".join([f"{count:6} {unit} {ns:7.3f}" for count, ns in each.items()])
        print(f"  {job:28}{points}   ratio {ratio:.2f}", flush=True)

    def episodes(breaks: str) -> dict[int, list[list[Turn]]]:
        return {
            num_turns: make_trajectories(
                "short",
                breaks=breaks,
                num_trajectories=max(1, 8 * num_rows // num_turns**2),
                num_turns=num_turns,
            )
            for num_turns in (8, 16, 32, 64)
        }

    merging: dict[int, tuple[Callable[[], Any], int]] = {}
    looping: dict[int, tuple[Callable[[], Any], int]] = {}
    assembling: dict[int, tuple[Callable[[], Any], int]] = {}
    for count, turns in episodes("none").items():
        given = _num_tokens(turns)
        lists = turns_as_lists(turns)
        stored = [store_turns(own) for own in turns]
        merging[count] = (lambda turns=turns: _merged(turns)), given
        looping[count] = (lambda lists=lists: loops.merge_lists(lists)), given
        assembling[count] = _assembly(stored), sum(len(t.token_ids) for own in stored for t in own)
    add("merging whole prompts", "turns", merging)
    add("  the loop, without arrays", "turns", looping)
    add("stored turns to columns", "turns", assembling)
    for where in ("late", "inside"):
        broken: dict[int, tuple[Callable[[], Any], int]] = {
            count: ((lambda turns=turns: _merged(turns)), _num_tokens(turns))
            for count, turns in episodes(f"every turn, {where}").items()
        }
        add(f"  edited every turn, {where}", "turns", broken)
    collating: dict[int, tuple[Callable[[], Any], int]] = {}
    for count in (num_rows // 4, num_rows // 2, num_rows, num_rows * 2):
        rows = make_rows(*lengths_of("short", count))
        collating[count] = _padding(rows), len(rows.input_ids.values)
    add("left padded, short", "rows", collating)
    return found


def _num_tokens(trajectories: list[list[Turn]]) -> int:
    return sum(len(t.prompt_ids) + len(t.response_ids) for own in trajectories for t in own)


def _padding(rows: Rows) -> Callable[[], Any]:
    widths = {
        "width": int(rows.input_ids.lengths.max()),
        "response_width": int(rows.loss_mask.lengths.max()),
    }
    return lambda: left_padded(rows, **widths, pad_token_id=0)


# ------------------------------------------------------------------------------ report


def report(lines: list[Line]) -> None:
    """Say what was aimed at and what was reached."""
    print("\ngoals")
    goal = COLLATION_GOAL
    own = [line for line in lines if line.goal == goal]
    least = min(own, key=lambda line: line.gain)
    said = "reached" if least.gain >= goal else "missed"
    print(f"  collation: {goal:g} times the loop: {said}; least {least.gain:.1f} ({least.job})")
    for line in own:
        if line.gain < goal:
            alone = line.loop_ms / line.limit_ms
            print(f"    {line.job}: {line.gain:.1f}; numpy alone would be {alone:.1f}")
    within = [line for line in own if line.over_copy <= COPY_GOAL]
    print(f"  within {COPY_GOAL:g} times a copy of the bytes written: {len(within)} of {len(own)}")
    print("    (numpy's calls alone: a slice per row and column, into zeros)")
    for line in own:
        if line.over_copy > COPY_GOAL:
            print(
                f"    {line.job}: {line.over_copy:.1f}, of {line.num_bytes / 1e6:.0f} MB; "
                f"numpy's calls alone, with all places known: {line.limit_over_copy:.1f}"
            )


def _as_json(line: Line) -> dict[str, Any]:
    values = asdict(line) | {
        "gain": line.gain,
        "over_copy": line.over_copy,
        "over_limit": line.over_limit,
        "limit_over_copy": line.limit_over_copy,
    }
    return {name: None if value != value else value for name, value in values.items()}


def main() -> None:
    """Measure everything and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a few rows, to see that it works")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    num_rows, num_trajectories = (16, 8) if arguments.tiny else (1024, 512)
    rounds, loop_rounds = (1, 1) if arguments.tiny else (7, 3)
    table = Table(rounds=rounds)
    measure_collation(table, num_rows=num_rows, loop_rounds=loop_rounds)
    measure_packing(table, num_rows=num_rows, loop_rounds=loop_rounds)
    measure_merging(table, num_trajectories=num_trajectories, loop_rounds=loop_rounds)
    growth = measure_growth(num_rows=num_rows, rounds=rounds)
    report(table.lines)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        lines = [_as_json(line) for line in table.lines]
        arguments.json.write_text(json.dumps({"lines": lines, "growth": growth}, indent=2))


if __name__ == "__main__":
    main()
