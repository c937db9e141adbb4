"""Recorded trajectories through the batching core, against counts from their files alone.

What is expected comes from the loader that lies beside the files, which encodes every prompt
afresh, and from loops over Python lists; nothing of the core is in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer

from turnstream.batching.merge.merging import store_turns, turn_prompts
from turnstream.batching.planning.report import merge_breaks, merge_counts
from turnstream.types import StoredTurn, TrajectoryKey, Turn
from turnstream_server.generators.chat import ChatTokenizer
from turnstream_server.generators.recordings import read_groups

pytestmark = [pytest.mark.slow]

SETS = {
    "tau_bench_trajectories": 38,
    "tau2_trajectories": 20,
    "mint_trajectories": 20,
    "gsm8k_samples": 989,
    "game24_samples": 75,
}
"""How many groups of each set are read: of the two largest the first ones, of the others all."""

PUBLISHED = {
    "tau_bench_trajectories": (152, 1_824, 5_633_987, 599_503),
    "gsm8k_samples": (3_956, 3_956, 794_644, 794_644),
    "game24_samples": (7_500, 7_500, 682_978, 682_978),
}
"""Trajectories, turns, tokens turn by turn and tokens merged, of the sets that are read whole."""

Payload = Mapping[TrajectoryKey, Sequence[StoredTurn]]
TurnIds = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RealSet:
    """The same groups twice.

    Attributes:
        name: of its file.
        payload: as our own path reads, encodes and stores them.
        turns: (prompt, response) of every turn, by the loader beside the file.
    """

    name: str
    payload: Payload
    turns: Mapping[TrajectoryKey, Sequence[TurnIds]]


FAST = ("tau2_trajectories", "mint_trajectories")  # of several turns
OTHERS = [pytest.param(each, marks=pytest.mark.campaign) for each in SETS if each not in FAST]


@pytest.fixture(scope="module", params=[*FAST, *OTHERS])
def real_set(request: pytest.FixtureRequest, data_folder: Path, stats: ModuleType) -> RealSet:
    """One of the recorded sets."""
    path = data_folder / f"{request.param}.jsonl.gz"
    chat = ChatTokenizer.load(data_folder / "tokenizer")
    tokenizer = Tokenizer.from_file(str(data_folder / "tokenizer/tokenizer.json"))
    groups = read_groups(path)[: SETS[request.param]]
    uids = {group.prompt_uid for group in groups}
    lines = [line for line in stats.load(str(path)) if line["prompt_uid"] in uids]
    return RealSet(
        name=request.param,
        payload={
            TrajectoryKey(group.prompt_uid, recording.sample): stored(chat.encode_turns(recording))
            for group in groups
            for recording in group.recordings
        },
        turns={
            TrajectoryKey(line["prompt_uid"], line["sample"]): stats.turns(tokenizer, line)
            for line in lines
        },
    )


def stored(turns: Sequence[Turn]) -> list[StoredTurn]:
    return [replace(turn, payload_crc=turn.index) for turn in store_turns(turns)]


def slow_rows(turns: Sequence[TurnIds]) -> list[tuple[list[int], int]]:
    """Tokens and prompt length of every row, merged while a prompt begins with all of the last."""
    rows: list[tuple[list[int], int]] = []
    for prompt, response in turns:
        if rows and prompt[: len(rows[-1][0])] == rows[-1][0]:
            rows[-1] = (prompt + response, rows[-1][1])
        else:
            rows.append((prompt + response, len(prompt)))
    return rows


def test_tokens_turn_by_turn_and_merged_are_those_of_the_file(real_set: RealSet) -> None:
    found = merge_counts(real_set.payload)

    steps = [len(p) + len(r) for turns in real_set.turns.values() for p, r in turns]
    rows = [row for turns in real_set.turns.values() for row, _ in slow_rows(turns)]
    assert found == {
        "num_trajectories": len(real_set.turns),
        "num_turns": len(steps),
        "num_rows": len(rows),
        "num_turn_tokens": sum(steps),
        "num_row_tokens": sum(map(len, rows)),
        "merge_ratio": sum(steps) / sum(map(len, rows)),
    }
    counts = (found["num_trajectories"], found["num_turns"], found["num_turn_tokens"])
    published = (*counts, found["num_row_tokens"])
    assert published == PUBLISHED.get(real_set.name, published)
    assert [*merge_breaks(real_set.payload)] == []
    for key, stored_turns in real_set.payload.items():
        pairs = zip(turn_prompts(stored_turns), stored_turns, strict=True)
        found_ids = [(prompt.tolist(), turn.response_ids.tolist()) for prompt, turn in pairs]
        assert found_ids == real_set.turns[key]


def test_rewritten_tool_calls_break_as_many_merges_as_published(
    data_folder: Path, stats: ModuleType, tmp_path: Path
) -> None:
    lines = list(stats.load(str(data_folder / "tau_bench_trajectories.jsonl.gz")))
    anew = [{**line, "messages": [stats.redump(m) for m in line["messages"]]} for line in lines]
    both = encode(data_folder, tmp_path, *lines, *anew)
    payload = {
        TrajectoryKey(line["prompt_uid"], line["sample"]): store_turns(
            [
                replace(seen, response_ids=own.response_ids)
                for own, seen in zip(sampled, shown, strict=True)
            ]
        )
        for line, sampled, shown in zip(lines, both[: len(lines)], both[len(lines) :], strict=True)
    }

    found = merge_counts(payload)

    assert found["num_rows"] - found["num_trajectories"] == 727
    assert round(found["merge_ratio"], 2) == 1.86


def encode(data_folder: Path, folder: Path, *lines: Mapping[str, Any]) -> list[list[Turn]]:
    """The turns of these lines, by our own path from a file on."""
    path = folder / "lines.jsonl"
    named = [{**line, "prompt_uid": str(number)} for number, line in enumerate(lines)]
    path.write_text("".join(json.dumps(line) + "\n" for line in named))
    chat = ChatTokenizer.load(data_folder / "tokenizer")
    return [chat.encode_turns(each) for group in read_groups(path) for each in group.recordings]
