"""A replay process against a real store, without a batcher: what the run knows afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from turnstream.batching.merge.merging import turn_prompts
from turnstream.records.events import decode_event
from turnstream.records.turns import decode_turn
from turnstream.store.client import keys
from turnstream.types import SealedTrajectory, Status, TrajectoryKey, TrajectoryState
from turnstream_server.console.summary import RunHistory
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.generators.chat import ChatTokenizer
from turnstream_server.generators.config import ReplayConfig
from turnstream_server.generators.recordings import read_groups
from turnstream_server.generators.replay import run_replay
from turnstream_server.launch.job import write_policy
from turnstream_server.ledger.queries.ledger import read_ledger
from turnstream_server.models.spec import SmallModelSpec

NewRun = Callable[..., str]


def line(prompt_uid: str, sample: int, **changes: Any) -> dict[str, Any]:
    """A recording of two turns."""
    texts = ("go", f"left {sample}", "wall", f"right {sample}")
    roles = ("user", "assistant", "tool", "assistant")
    return {
        "prompt_uid": prompt_uid,
        "sample": sample,
        "reward": float(sample),
        "policy": "tiny",
        "finish": "user_stop",
        "messages": [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=True)
        ],
        "turns": [1, 3],
        **changes,
    }


@pytest.fixture
def replay(
    client: redis.Redis,
    server: EmbeddedServer,
    new_run: NewRun,
    tmp_path: Path,
    tokenizer_folder: Path,
) -> Callable[..., ReplayConfig]:
    """`replay(*lines, **changes)` publishes a file of these lines into a new run."""

    def publish(*lines: dict[str, Any], **changes: Any) -> ReplayConfig:
        path = tmp_path / "recordings.jsonl"
        path.write_text("".join(json.dumps(recorded) + "\n" for recorded in lines))
        config = ReplayConfig(
            redis_url=server.url,
            run=new_run(client),
            writer="replay",
            recordings=path,
            tokenizer=tokenizer_folder,
            **changes,
        )
        run_replay(config)
        return config

    return publish


def sealed(client: redis.Redis, run: str) -> dict[TrajectoryKey, SealedTrajectory]:
    """Every sealed trajectory that the run was told of."""
    entries: Any = client.xrange(keys.run_keys(run).events)
    events = [decode_event(fields[b"r"]) for _, fields in entries]
    return {event.key: event for event in events if isinstance(event, SealedTrajectory)}


def test_recordings_are_sealed_with_the_turns_that_the_model_saw(
    client: redis.Redis, replay: Callable[..., ReplayConfig], tokenizer_folder: Path
) -> None:
    config = replay(line("maze/1", 0), line("maze/1", 1, finish="max_steps"), line("maze/2", 0))
    history = RunHistory(client, config.run)

    summary = history.summary()

    seen = sealed(client, config.run)
    second = seen[TrajectoryKey("maze/1", 1)]
    assert seen.keys() == {TrajectoryKey("maze/1", 0), second.key, TrajectoryKey("maze/2", 0)}
    assert (second.reward, second.status) == (1.0, Status.TRUNCATED)
    assert second.tags == {"policy": "tiny", "finish": "max_steps"}
    assert not second.has_logprobs
    recording = read_groups(config.recordings)[0].recordings[1]
    expected = ChatTokenizer.load(tokenizer_folder).encode_turns(recording)
    names = keys.trajectory_keys(config.run, keys.trajectory_id(second.key))
    entries: Any = client.xrange(names.turns)
    stored = [decode_turn(fields[b"r"]) for _, fields in entries[:-1]]
    assert len(second.turns) == 2
    for turn, read, prompt in zip(expected, stored, turn_prompts(stored), strict=True):
        assert np.array_equal(prompt, turn.prompt_ids)
        assert np.array_equal(read.response_ids, turn.response_ids)
    assert (summary.groups, summary.trajectories, summary.turns) == (2, 3, 6)
    assert (summary.batches, summary.steps, summary.sequences) == (0, 0, 0)
    assert summary.ledger == {"sealed": 3}
    assert summary.wire_bytes == sum(seal.num_payload_bytes for seal in seen.values())
    assert summary.resend_bytes > summary.wire_bytes
    assert history.summary() == summary


def test_a_recording_without_a_turn_is_abandoned_with_the_reason(
    client: redis.Redis, replay: Callable[..., ReplayConfig]
) -> None:
    config = replay(line("maze/1", 0), line("maze/1", 1, turns=[]))

    ledger = read_ledger(client, config.run)
    value = client.hget(keys.run_keys(config.run).ledger, "maze%2F1/1/0")
    assert ledger.by_state[TrajectoryState.SEALED] == 1
    assert ledger.by_state[TrajectoryState.ABANDONED] == 1
    assert value == b"abandoned:the recording has no turn"


def test_log_probabilities_are_sent_where_a_policy_is_given(
    client: redis.Redis, replay: Callable[..., ReplayConfig], tmp_path: Path
) -> None:
    policy = SmallModelSpec(vocab_size=400, hidden_size=8, intermediate_size=8, num_heads=1)

    config = replay(line("maze/1", 0), policy=write_policy(tmp_path, policy))

    assert sealed(client, config.run)[TrajectoryKey("maze/1", 0)].has_logprobs
