"""A generator process that publishes recorded trajectories, turn by turn, as if they were live."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from turnstream.generator import GroupWriter, Publisher
from turnstream.types import Turn
from turnstream_server.generators.chat import ChatTokenizer
from turnstream_server.generators.config import ReplayConfig
from turnstream_server.generators.metrics import PublisherMetrics
from turnstream_server.generators.recordings import RecordedGroup, Recording, read_groups
from turnstream_server.models.spec import read_policy_source
from turnstream_server.telemetry.instruments import collected

logger = logging.getLogger(__name__)

TurnsOf = Callable[[Recording], list[Turn]]


def run_replay(config: ReplayConfig) -> None:
    """Publish this process's share of the file and wait until the store has all of it."""
    groups = groups_of_shard(read_groups(config.recordings), config)
    turns_of = _encoder(config)
    with (
        Publisher(
            config.redis_url,
            config.run,
            writer=config.writer,
            admission_timeout_s=config.timeout_s,
        ) as publisher,
        collected(PublisherMetrics("replayer", publisher.statistics)),
    ):
        for group in groups:
            turns = [turns_of(recording) for recording in group.recordings]
            uid = group.prompt_uid
            with publisher.group(uid, len(turns), prompt_uid=uid) as writer:
                _publish_group(writer, group, turns)
        publisher.flush()
        logger.info("replay done", extra={"groups": len(groups)})


def groups_of_shard(groups: Sequence[RecordedGroup], config: ReplayConfig) -> list[RecordedGroup]:
    """Return the groups that this process publishes, in order of the file."""
    return list(groups[: config.max_groups or None][config.shard :: config.num_shards])


def _publish_group(
    writer: GroupWriter, group: RecordedGroup, turns: Sequence[Sequence[Turn]]
) -> None:
    """Publish the first turns of all trajectories, then the second ones, and so on.

    Sample k is the k-th recording.
    """
    with ExitStack() as stack:
        trajectories = [
            stack.enter_context(writer.trajectory(sample)) for sample in range(len(turns))
        ]
        for trajectory, recording in zip(trajectories, group.recordings, strict=True):
            if not recording.turns:
                trajectory.abandon("the recording has no turn")
        order = sorted((index, k) for k, own in enumerate(turns) for index in range(len(own)))
        for index, sample in order:
            turn, recording = turns[sample][index], group.recordings[sample]
            trajectories[sample].append(turn.prompt_ids, turn.response_ids, logprobs=turn.logprobs)
            if index + 1 == len(recording.turns):
                labels = recording.model_dump(include={"policy", "source", "finish"})
                trajectories[sample].seal(
                    recording.reward,
                    status=recording.status,
                    tags={name: label for name, label in labels.items() if label},
                )


def _encoder(config: ReplayConfig) -> TurnsOf:
    """Return a function from a recording to its turns, with log-probabilities of the policy."""
    chat = ChatTokenizer.load(config.tokenizer)
    if config.policy is None:
        return chat.encode_turns
    from turnstream_server.models.logprobs import score_turns
    from turnstream_server.models.policy import load_policy

    model = load_policy(read_policy_source(config.policy))
    return lambda recording: score_turns(model, chat.encode_turns(recording))
