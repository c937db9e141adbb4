"""Recorded trajectories through the whole path, and what the trainer saw of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import list_runs
from turnstream.types import TrajectoryKey
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.generators.chat import ChatTokenizer
from turnstream_server.generators.recordings import Recording, read_groups

if TYPE_CHECKING:
    from tests.e2e.conftest import Job

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_GROUPS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One trajectory merged into one row: as the file has it, or as the trainer saw it."""

    prompt_length: int
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    reward: float


def replay(job: Job, data_folder: Path, *options: str) -> dict[str, Any]:
    """Run the job on the first groups of a file; gives its summary."""
    status, output = job.run(
        *("replay", str(data_folder / "tau_bench_trajectories.jsonl.gz")),
        *("--tokenizer", str(data_folder / "tokenizer"), "--groups", str(NUM_GROUPS)),
        *("--batch-groups", "2", "--json", str(job.json_path), *options),
        timeout_s=350,
    )
    assert status == 0, output + job.logs()
    return json.loads(job.json_path.read_text())


def recordings(data_folder: Path) -> dict[str, Recording]:
    """The first recordings of the file, by trajectory id."""
    groups = read_groups(data_folder / "tau_bench_trajectories.jsonl.gz")[:NUM_GROUPS]
    return {
        keys.trajectory_id(TrajectoryKey(group.prompt_uid, recording.sample)): recording
        for group in groups
        for recording in group.recordings
    }


def row_of(recording: Recording, chat: ChatTokenizer) -> Row:
    """The row that its turns must merge to; independent of the code that merges."""
    turns = chat.encode_turns(recording)
    first, last = turns[0], turns[-1]
    input_ids = np.concatenate([last.prompt_ids, last.response_ids])
    mask = np.zeros(len(input_ids), np.uint8)
    for turn in turns:
        mask[len(turn.prompt_ids) : len(turn.prompt_ids) + len(turn.response_ids)] = 1
    prompt_length = len(first.prompt_ids)
    return Row(
        prompt_length=prompt_length,
        input_ids=input_ids,
        loss_mask=mask[prompt_length:],
        reward=recording.reward,
    )


def dumped_rows(folder: Path) -> Iterator[tuple[str, Row, NDArray[np.float32] | None]]:
    """(trajectory id, row, log-probabilities) of every row that the trainer trained on."""
    for path in sorted(folder.glob("step-*.npz")):
        with np.load(path) as columns:
            logprobs = columns.get("logprobs")
            for row, name in enumerate(columns["trajectory_id"]):
                tokens = slice(*columns["row_offsets"][row : row + 2])
                response = slice(*columns["response_offsets"][row : row + 2])
                seen = Row(
                    prompt_length=int(columns["prompt_length"][row]),
                    input_ids=columns["input_ids"][tokens],
                    loss_mask=columns["loss_mask"][response],
                    reward=float(columns["reward"][row]),
                )
                yield str(name), seen, None if logprobs is None else logprobs[response]


def appended_bytes(job: Job) -> int:
    """Bytes of every turn record in the job's store, read from the streams themselves."""
    with EmbeddedServer(job.folder / "store") as server, connect(server.url) as client:
        [run] = list_runs(client)
        names: Any = client.hkeys(keys.run_keys(run).ledger)
        streams = [keys.trajectory_keys(run, name.decode()).turns for name in names]
        entries: list[Any] = [client.xrange(stream) for stream in streams]
    # The last entry of a stream is the seal.
    return sum(len(fields[b"r"]) for stream in entries for _, fields in stream[:-1])


def assert_same_rows(job: Job, data_folder: Path, dump: Path) -> None:
    """Every recording was trained on once, token for token as the file has it."""
    chat = ChatTokenizer.load(data_folder / "tokenizer")
    expected = {name: row_of(made, chat) for name, made in recordings(data_folder).items()}
    seen = {name: row for name, row, _ in dumped_rows(dump)}
    assert seen.keys() == expected.keys()
    assert len(list(dumped_rows(dump))) == len(expected)
    for name, row in expected.items():
        assert seen[name].prompt_length == row.prompt_length
        assert np.array_equal(seen[name].input_ids, row.input_ids)
        assert np.array_equal(seen[name].loss_mask, row.loss_mask)
        assert seen[name].reward == row.reward


def test_the_trainer_sees_every_recorded_trajectory_token_for_token(
    job: Job, data_folder: Path, tmp_path: Path
) -> None:
    """Takes more than 5 s: the whole job runs on recorded trajectories, with torch."""
    summary = replay(job, data_folder, "--dump", str(tmp_path / "dump"))

    assert_same_rows(job, data_folder, tmp_path / "dump")
    rows = [row for _, row, _ in dumped_rows(tmp_path / "dump")]
    num_tokens = sum(len(row.input_ids) for row in rows)
    num_trajectories = len(recordings(data_folder))
    assert summary["ledger"] == {"committed": num_trajectories}
    assert summary["trajectories"] == summary["sequences"] == num_trajectories
    assert (summary["groups"], summary["batches"], summary["steps"]) == (NUM_GROUPS, 2, 2)
    assert summary["turns"] == sum(len(r.turns) for r in recordings(data_folder).values())
    assert summary["wire_bytes"] == appended_bytes(job)
    assert summary["wire_bytes"] <= 1.25 * 4 * num_tokens
    assert summary["resend_bytes"] >= 8 * summary["wire_bytes"]
    assert job.processes() == []
    assert job.files_outside() == []


@pytest.mark.campaign
def test_log_probabilities_travel_with_the_recorded_tokens(
    job: Job, data_folder: Path, tmp_path: Path
) -> None:
    replay(job, data_folder, "--logprobs", "--processes", "1", "--dump", str(tmp_path / "dump"))

    assert_same_rows(job, data_folder, tmp_path / "dump")
    num_tokens = num_trained = 0
    for _, row, logprobs in dumped_rows(tmp_path / "dump"):
        assert logprobs is not None
        assert (logprobs[row.loss_mask == 1] < 0).all()
        assert (logprobs[row.loss_mask == 0] == 0).all()
        num_tokens += len(row.input_ids)
        num_trained += int(row.loss_mask.sum())
    assert appended_bytes(job) <= 1.25 * 4 * num_tokens + 5 * num_trained
