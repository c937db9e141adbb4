from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turnstream.errors import InvalidConfigError, RecordError
from turnstream.types import Status
from turnstream_server.generators.config import ReplayConfig
from turnstream_server.generators.recordings import Message, RecordedGroup, Recording, read_groups
from turnstream_server.generators.replay import groups_of_shard


def multi_turn(**changes: Any) -> dict[str, Any]:
    line: dict[str, Any] = {
        "prompt_uid": "maze/1",
        "sample": 0,
        "policy": "tiny",
        "reward": 1.0,
        "source": "maze",
        "finish": "user_stop",
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "left"},
            {"role": "tool", "content": "wall"},
            {"role": "assistant", "content": "right"},
            {"role": "user", "content": "###STOP###"},
        ],
        "turns": [1, 3],
    }
    return {**line, **changes}


def samples(**changes: Any) -> dict[str, Any]:
    line: dict[str, Any] = {
        "prompt_uid": "sum/1",
        "question": "1+1?",
        "samples": [
            {"sample": 0, "policy": "a", "response": "2", "reward": 1.0},
            {"sample": 1, "policy": "b", "response": "3", "reward": 0},
        ],
    }
    return {**line, **changes}


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recordings_of(path: Path) -> list[Recording]:
    return [each for group in read_groups(path) for each in group.recordings]


def test_lines_of_both_shapes_are_grouped_by_their_prompt(tmp_path: Path) -> None:
    plain = write_lines(
        tmp_path / "a.jsonl", multi_turn(sample=1), samples(), multi_turn(sample=0, reward=0)
    )
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))

    groups = read_groups(plain)

    assert read_groups(packed) == groups
    assert [group.prompt_uid for group in groups] == ["maze/1", "sum/1"]
    assert [recording.sample for recording in groups[0].recordings] == [0, 1]
    long = groups[0].recordings[1]
    assert (long.prompt_uid, long.sample, long.reward) == ("maze/1", 1, 1.0)
    assert long.messages[1] == Message(role="assistant", content="left")
    assert (long.turns, long.policy, long.source) == ([1, 3], "tiny", "maze")
    first, second = groups[1].recordings
    texts = [(each.role, each.text) for each in first.messages]
    assert texts == [("user", "1+1?"), ("assistant", "2")]
    assert (first.turns, first.sample, first.reward, first.policy) == ([1], 0, 1.0, "a")
    assert (second.sample, second.reward, second.policy) == (1, 0.0, "b")


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        ("user_stop", Status.COMPLETED),
        ("", Status.COMPLETED),
        ("max_steps", Status.TRUNCATED),
        ("max_propose_steps", Status.TRUNCATED),
        ("error", Status.ERROR),
        ("aborted", Status.ABORTED),
    ],
)
def test_says_in_our_words_how_an_episode_ended(
    tmp_path: Path, finish: str, status: Status
) -> None:
    path = write_lines(tmp_path / "a.jsonl", multi_turn(finish=finish))

    [recording] = recordings_of(path)

    assert recording.status is status


def test_writes_tool_calls_after_the_content_and_keeps_string_arguments_verbatim(
    tmp_path: Path,
) -> None:
    calls = [
        {"function": {"name": "buy", "arguments": '{"n":  1}'}},
        {"function": {"name": "söll", "arguments": {"n": "é"}}},
    ]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "ok", "tool_calls": calls},
        {"role": "assistant", "content": None, "tool_calls": calls[:1]},
    ]
    path = write_lines(tmp_path / "a.jsonl", multi_turn(messages=messages, turns=[1, 2]))

    [recording] = recordings_of(path)

    first = '<tool_call>\n{"name": "buy", "arguments": {"n":  1}}\n</tool_call>'
    second = '<tool_call>\n{"name": "söll", "arguments": {"n": "é"}}\n</tool_call>'
    assert recording.messages[1].text == f"ok\n{first}\n{second}"
    assert recording.messages[2].text == first


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (multi_turn(reward=None), "field reward: "),
        (multi_turn(reward="1"), "field reward: "),
        (multi_turn(reward=float("nan")), "field reward: "),
        (multi_turn(sample=-1), "field sample: "),
        (multi_turn(sample=True), "field sample: "),
        (multi_turn(prompt_uid=7), "field prompt_uid: "),
        (multi_turn(turns=[1, 9]), "field turns: "),
        (multi_turn(turns=[3, 1]), "field turns: "),
        (multi_turn(turns=[1, 1]), "field turns: "),
        (multi_turn(turns=[2]), "field turns: "),
        (multi_turn(turns="1"), "field turns: "),
        (multi_turn(turns=[1.5]), r"field turns\[0\]: "),
        (multi_turn(messages=[{"content": "go"}], turns=[]), r"field messages\[0\]\.role: "),
        (multi_turn(messages=["go"], turns=[]), r"field messages\[0\]: "),
        (
            multi_turn(messages=[{"role": "assistant", "tool_calls": [{}]}], turns=[0]),
            r"field messages\[0\]\.tool_calls\[0\]\.function: ",
        ),
        (samples(question=None), "field question: "),
        (samples(samples=[{"sample": 0, "reward": 1}]), r"field samples\[0\]\.response: "),
        (samples(samples=[{"sample": 0, "response": "2"}]), r"field samples\[0\]\.reward: "),
        ({"prompt_uid": "a", "question": "b"}, "has neither field messages nor field samples"),
        (multi_turn(), "field sample: prompt 'maze/1' has sample 0 twice"),
        *((line, "") for line in (b"{not json}", b'{"a": "\xff"}', b"[1]")),
    ],
)
def test_bad_line_is_refused_with_file_line_and_field(
    tmp_path: Path, line: dict[str, Any] | bytes, problem: str
) -> None:
    path = write_lines(tmp_path / "bad.jsonl", multi_turn())
    with path.open("ab") as file:
        file.write(line if isinstance(line, bytes) else json.dumps(line).encode())

    with pytest.raises(RecordError, match=rf"bad\.jsonl, line 2\b.*{problem}"):
        read_groups(path)


def test_gzip_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(multi_turn()).encode())[:-12])

    with pytest.raises(RecordError, match="damaged gzip file"):
        read_groups(path)


def test_writes_messages_as_the_recorded_sets_describe(
    data_folder: Path, stats: ModuleType
) -> None:
    path = data_folder / "tau_bench_trajectories.jsonl.gz"

    ours = recordings_of(path)

    theirs = [
        [(m["role"], stats.body(m)) for m in line["messages"]] for line in stats.load(str(path))
    ]
    assert [[(m.role, m.text) for m in recording.messages] for recording in ours] == theirs


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_shards_together_publish_every_group_of_the_limit_once(num_shards: int) -> None:
    groups = [RecordedGroup(prompt_uid=str(number), recordings=()) for number in range(5)]

    for max_groups, expected in ((0, "01234"), (3, "012")):
        configs = [
            replay_config(shard=shard, num_shards=num_shards, max_groups=max_groups)
            for shard in range(num_shards)
        ]
        taken = [group.prompt_uid for each in configs for group in groups_of_shard(groups, each)]
        assert sorted(taken) == [*expected]


def test_shard_beyond_the_last_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="shard: 2 is not below 2"):
        replay_config(shard=2, num_shards=2)


def replay_config(**changes: Any) -> ReplayConfig:
    paths: dict[str, Any] = {"recordings": Path("a.jsonl"), "tokenizer": Path("tokenizer")}
    return ReplayConfig(redis_url="redis://nowhere", run="run", writer="replay", **paths, **changes)
