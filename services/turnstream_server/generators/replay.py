"""A generator process that publishes recorded trajectories, turn by turn, as if they were live."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from turnstream.errors import InvalidConfigError
from turnstream.generator import GroupWriter, Publisher, TrajectoryWriter
from turnstream.types import Turn
from turnstream_server.generators.chat import ChatTokenizer
from turnstream_server.generators.recordings import RecordedGroup, Recording, read_groups
from turnstream_server.models.spec import PolicySource

logger = logging.getLogger(__name__)

TurnsOf = Callable[[Recording], list[Turn]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """One replay process.

    Attributes:
        redis_url: the store.
        run: name of the run; it must exist.
        writer: name of this process, different in every generator of the run.
        recordings: the file; see `recordings.py` for its shapes.
        tokenizer: folder of the tokenizer.
        shard, num_shards: this process publishes the groups shard, shard + num_shards, ...
        max_groups: only so many groups from the beginning of the file; 0 means all.
        speed: recorded seconds per second, if the file has times; 0 is as fast as the run admits
            groups.
        policy: computes the log-probabilities of the responses; None sends none.
        num_threads: threads of torch; 0 takes torch's default.
        timeout_s: longest wait for the admission of a group.
    """

    redis_url: str
    run: str
    writer: str
    recordings: Path
    tokenizer: Path
    shard: int = 0
    num_shards: int = 1
    max_groups: int = 0
    speed: float = 0.0
    policy: PolicySource | None = None
    num_threads: int = 0
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.num_shards:
            raise InvalidConfigError("shard", f"{self.shard} is not below {self.num_shards}")
        if self.speed < 0:
            raise InvalidConfigError("speed", f"{self.speed} is negative")


class _ScheduledTurn(NamedTuple):
    """One turn in the order of its group; `due_s` is its recorded time, or 0.0."""

    due_s: float
    turn: int
    sample: int


def run_replay(config: ReplayConfig) -> None:
    """Publish this process's share of the file and wait until the store has all of it."""
    groups = groups_of_shard(read_groups(config.recordings), config)
    turns_of = _encoder(config)
    with Publisher(
        config.redis_url,
        config.run,
        writer=config.writer,
        admission_timeout_s=config.timeout_s,
    ) as publisher:
        for group in groups:
            turns = [turns_of(recording) for recording in group.recordings]
            with publisher.group(
                group.prompt_uid, len(turns), prompt_uid=group.prompt_uid
            ) as writer:
                _publish_group(writer, group, turns, speed=config.speed)
        publisher.flush()
        logger.info("replay done", extra={"groups": len(groups)})


def groups_of_shard(groups: Sequence[RecordedGroup], config: ReplayConfig) -> list[RecordedGroup]:
    """The groups that this process publishes, in order of the file."""
    wanted = groups[: config.max_groups or None]
    return list(wanted[config.shard :: config.num_shards])


def schedule(group: RecordedGroup) -> list[_ScheduledTurn]:
    """Return the turns of a group in the order of publication.

    If all trajectories have recorded times, these decide, and each trajectory begins at 0.
    Otherwise the first turns of all trajectories come first, then the second ones, and so on.
    """
    timed = all(recording.times for recording in group.recordings)
    return sorted(
        _ScheduledTurn(
            due_s=recording.times[message] - recording.times[0] if timed else 0.0,
            turn=turn,
            sample=sample,
        )
        for sample, recording in enumerate(group.recordings)
        for turn, message in enumerate(recording.turns)
    )


def _publish_group(
    writer: GroupWriter,
    group: RecordedGroup,
    turns: Sequence[Sequence[Turn]],
    *,
    speed: float,
) -> None:
    """Publish the trajectories of a group concurrently; sample k is the k-th recording."""
    with ExitStack() as stack:
        open_writers = [
            stack.enter_context(writer.trajectory(sample)) for sample in range(len(turns))
        ]
        for sample, recording in enumerate(group.recordings):
            if not recording.turns:
                open_writers[sample].abandon("the recording has no turn")
        for scheduled in _paced(schedule(group), speed=speed):
            turn = turns[scheduled.sample][scheduled.turn]
            trajectory = open_writers[scheduled.sample]
            trajectory.append(turn.prompt_ids, turn.response_ids, logprobs=turn.logprobs)
            if scheduled.turn + 1 == len(turns[scheduled.sample]):
                _seal(trajectory, group.recordings[scheduled.sample])


def _seal(trajectory: TrajectoryWriter, recording: Recording) -> None:
    labels = {
        "policy": recording.policy,
        "source": recording.source,
        "finish": recording.finish,
    }
    trajectory.seal(
        recording.reward,
        status=recording.status,
        tags={name: label for name, label in labels.items() if label},
    )


def _paced(turns: Sequence[_ScheduledTurn], *, speed: float) -> Iterator[_ScheduledTurn]:
    """Yield the turns, each no earlier than it is due; at once if `speed` is 0."""
    clock = threading.Event()
    start_s = time.monotonic()
    for scheduled in turns:
        if speed:
            clock.wait(max(0.0, start_s + scheduled.due_s / speed - time.monotonic()))
        yield scheduled


def _encoder(config: ReplayConfig) -> TurnsOf:
    """Return a function from a recording to its turns, with log-probabilities of the policy."""
    chat = ChatTokenizer.load(config.tokenizer)
    if config.policy is None:
        return chat.encode_turns
    import torch

    from turnstream_server.generators.scoring import score_turns
    from turnstream_server.models.policy import load_policy

    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    model = load_policy(config.policy)
    return lambda recording: score_turns(model, chat.encode_turns(recording))
