from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turnstream.errors import RecordError
from turnstream.types import Status
from turnstream_server.generators.recordings import Message, read_groups, read_recordings


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


def test_reads_a_multi_turn_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", multi_turn())

    [recording] = read_recordings(path)

    assert (recording.prompt_uid, recording.sample, recording.reward) == ("maze/1", 0, 1.0)
    assert recording.messages[1] == Message(role="assistant", content="left")
    assert recording.turns == [1, 3]
    assert (recording.policy, recording.source) == ("tiny", "maze")


def test_reads_every_sample_of_a_line_as_a_trajectory_of_one_turn(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", samples())

    first, second = read_recordings(path)

    assert [(each.role, each.text) for each in first.messages] == [
        ("user", "1+1?"),
        ("assistant", "2"),
    ]
    assert (first.turns, first.sample, first.reward, first.policy) == ([1], 0, 1.0, "a")
    assert (second.sample, second.reward, second.policy) == (1, 0.0, "b")


def test_reads_plain_and_gzip_files_alike(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "a.jsonl", multi_turn(), samples())
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))

    assert list(read_recordings(packed)) == list(read_recordings(plain))


def test_groups_lines_of_one_prompt_wherever_they_stand(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", multi_turn(sample=1), samples(), multi_turn(sample=0, reward=0)
    )

    groups = read_groups(path)

    assert [group.prompt_uid for group in groups] == ["maze/1", "sum/1"]
    assert [recording.sample for recording in groups[0].recordings] == [0, 1]


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

    [recording] = read_recordings(path)

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

    [recording] = read_recordings(path)

    first = '<tool_call>\n{"name": "buy", "arguments": {"n":  1}}\n</tool_call>'
    second = '<tool_call>\n{"name": "söll", "arguments": {"n": "é"}}\n</tool_call>'
    assert recording.messages[1].text == f"ok\n{first}\n{second}"
    assert recording.messages[2].text == first


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (multi_turn(reward=None), "reward"),
        (multi_turn(reward="1"), "reward"),
        (multi_turn(reward=float("nan")), "reward"),
        (multi_turn(sample=-1), "sample"),
        (multi_turn(sample=True), "sample"),
        (multi_turn(prompt_uid=7), "prompt_uid"),
        (multi_turn(turns=[1, 9]), "turns"),
        (multi_turn(turns=[3, 1]), "turns"),
        (multi_turn(turns=[1, 1]), "turns"),
        (multi_turn(turns=[2]), "turns"),
        (multi_turn(turns="1"), "turns"),
        (multi_turn(turns=[1.5]), r"turns\[0\]"),
        (multi_turn(messages=[{"content": "go"}], turns=[]), r"messages\[0\]\.role"),
        (multi_turn(messages=["go"], turns=[]), r"messages\[0\]"),
        (
            multi_turn(messages=[{"role": "assistant", "tool_calls": [{}]}], turns=[0]),
            r"messages\[0\]\.tool_calls\[0\]\.function",
        ),
        (samples(question=None), "question"),
        (samples(samples=[{"sample": 0, "reward": 1}]), r"samples\[0\]\.response"),
        (samples(samples=[{"sample": 0, "response": "2"}]), r"samples\[0\]\.reward"),
    ],
)
def test_names_file_line_and_field_of_a_bad_line(
    tmp_path: Path, line: dict[str, Any], field: str
) -> None:
    path = write_lines(tmp_path / "bad.jsonl", multi_turn(), line)

    with pytest.raises(RecordError, match=rf"bad\.jsonl, line 2, field {field}: "):
        list(read_recordings(path))


def test_refuses_a_line_of_neither_shape(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"prompt_uid": "a", "question": "b"})

    with pytest.raises(RecordError, match="line 1: has neither field messages nor field samples"):
        list(read_recordings(path))


@pytest.mark.parametrize("line", [b"{not json}\n", b'{"a": "\xff"}\n', b"[1]\n"])
def test_names_the_line_that_is_no_json_object(tmp_path: Path, line: bytes) -> None:
    path = write_lines(tmp_path / "a.jsonl", multi_turn())
    path.write_bytes(path.read_bytes() + line)

    with pytest.raises(RecordError, match=r"a\.jsonl, line 2: "):
        list(read_recordings(path))


def test_refuses_a_gzip_file_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(multi_turn()).encode())[:-12])

    with pytest.raises(RecordError, match="damaged gzip file"):
        list(read_recordings(path))


def test_refuses_the_same_sample_twice(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", multi_turn(), samples(), multi_turn())

    with pytest.raises(RecordError, match=r"line 3, field sample: .*'maze/1' has sample 0 twice"):
        read_groups(path)


def test_writes_messages_as_the_recorded_sets_describe(
    data_folder: Path, stats: ModuleType
) -> None:
    path = data_folder / "tau_bench_trajectories.jsonl.gz"

    ours = list(read_recordings(path))

    theirs = [
        [(m["role"], stats.body(m)) for m in line["messages"]] for line in stats.load(str(path))
    ]
    assert [[(m.role, m.text) for m in recording.messages] for recording in ours] == theirs
