"""The seal of a trajectory as a message: what the plan knows of it, turn by turn."""

from __future__ import annotations

from turnstream.errors import CorruptRecordError
from turnstream.records.keys import by_name, decode_key, decode_status, encode_key
from turnstream.types import NO_PARENT, SealedTrajectory, TurnShape, VersionRun
from turnstream.wire.v1 import records_pb2 as wire


def encode_seal(event: SealedTrajectory) -> wire.TrajectorySealed:
    """The seal of a trajectory as a message."""
    versions = event.turn_versions or ((),) * len(event.turns)
    anchors = event.anchors or (None,) * len(event.turns)
    turns = zip(
        *(event.turns, event.turn_rewards, event.payload_crcs, versions, anchors), strict=True
    )
    return wire.TrajectorySealed(  # an empty map costs a microsecond, None nothing
        key=encode_key(event.key),
        lease_epoch=event.lease_epoch,
        status=event.status.value,
        reward=event.reward,
        reward_components=event.reward_components or None,
        turns=[
            wire.TurnShape(
                parent_turn=shape.parent_turn,
                shared_tokens=shape.shared_tokens,
                num_new_prompt_tokens=shape.num_new_prompt_tokens,
                num_response_tokens=shape.num_response_tokens,
                num_trained_tokens=shape.num_trained_tokens,
                reward=reward,
                payload_crc=crc,
                trained_versions=[wire.VersionRun(version=v, count=n) for v, n in own],
                anchor=anchor,
            )
            for shape, reward, crc, own, anchor in turns
        ],
        oldest_version=event.oldest_version,
        newest_version=event.newest_version,
        num_payload_bytes=event.num_payload_bytes,
        has_logprobs=event.has_logprobs,
        sampling=event.sampling or None,
        tags=event.tags or None,
        metrics=event.metrics or None,
        awaits_reward=event.awaits_reward,
    )


def decode_seal(message: wire.TrajectorySealed) -> SealedTrajectory:
    """The trajectory that a message seals.

    Raises:
        CorruptRecordError: the message contradicts itself.
    """
    turns: list[TurnShape] = []
    rewards: list[float] = []
    crcs: list[int] = []
    versions: list[tuple[VersionRun, ...]] = []
    anchors: list[int | None] = []
    for turn in message.turns:
        shape = TurnShape(
            turn.parent_turn,
            turn.shared_tokens,
            turn.num_new_prompt_tokens,
            turn.num_response_tokens,
            turn.num_trained_tokens,
        )
        _check_shape(shape, earlier=turns)
        turns.append(shape)
        rewards.append(turn.reward)
        crcs.append(turn.payload_crc)
        versions.append(_decode_versions(turn))
        anchors.append(turn.anchor if turn.HasField("anchor") else None)
    return SealedTrajectory(
        key=decode_key(message),
        lease_epoch=message.lease_epoch,
        status=decode_status(message.status),
        reward=message.reward if message.HasField("reward") else None,
        reward_components=by_name(message.reward_components),
        turns=tuple(turns),
        turn_rewards=tuple(rewards),
        payload_crcs=tuple(crcs),
        anchors=() if set(anchors) <= {None} else tuple(anchors),
        turn_versions=_checked_versions(versions, turns),
        oldest_version=message.oldest_version if message.HasField("oldest_version") else None,
        newest_version=message.newest_version if message.HasField("newest_version") else None,
        num_payload_bytes=message.num_payload_bytes,
        has_logprobs=message.has_logprobs,
        sampling=by_name(message.sampling),
        tags=by_name(message.tags),
        metrics=by_name(message.metrics),
        awaits_reward=message.awaits_reward,
    )


def _decode_versions(turn: wire.TurnShape) -> tuple[VersionRun, ...]:
    return tuple(
        [
            VersionRun(run.version if run.HasField("version") else None, run.count)
            for run in turn.trained_versions
        ]
    )


def _checked_versions(
    versions: list[tuple[VersionRun, ...]], turns: list[TurnShape]
) -> tuple[tuple[VersionRun, ...], ...]:
    if not any(versions):
        return ()
    for index, (own, shape) in enumerate(zip(versions, turns, strict=True)):
        num_tokens = sum([run.num_tokens for run in own])
        if num_tokens != shape.num_trained_tokens:
            raise CorruptRecordError(
                f"turn {index} of a seal trains {shape.num_trained_tokens} tokens, "
                f"and its versions sampled {num_tokens}"
            )
    return tuple(versions)


def _check_shape(shape: TurnShape, *, earlier: list[TurnShape]) -> None:
    parent = shape.parent_turn
    if not NO_PARENT <= parent < len(earlier):
        raise CorruptRecordError(f"turn {len(earlier)} of a seal has the parent {parent}")
    num_shareable = 0 if parent == NO_PARENT else earlier[parent].num_tokens
    if shape.shared_tokens > num_shareable:
        raise CorruptRecordError(
            f"turn {len(earlier)} of a seal shares {shape.shared_tokens} tokens "
            f"of {num_shareable} in turn {parent}"
        )
    if shape.num_trained_tokens > shape.num_response_tokens:
        raise CorruptRecordError(
            f"turn {len(earlier)} of a seal trains {shape.num_trained_tokens} "
            f"of {shape.num_response_tokens} response tokens"
        )
