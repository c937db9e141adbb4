"""Dead letters replayed: written once more, mended or as they are, through the door of a publisher.

A letter is replayed as another attempt of its sample, while its group is undecided, or as a member
of a group of its own, which the operator names. The letter itself stays dead. In this order, so
that it may be done again after a crash anywhere, or by two at once::

    open     the attempt, for a writer that is named after the letter and its content
    claim    the letter says what it becomes; it can say one thing at a time, and another only where
             that ended before it was in a batch
    append   the turns
    seal     from here on it is a trajectory as any
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import redis

from turnstream.errors import ConflictError, CorruptRecordError
from turnstream.generator import Publisher, TrajectoryWriter
from turnstream.generator.drafts import draft_group
from turnstream.store import keys
from turnstream.store.configs import read_config
from turnstream.store.connection import connect
from turnstream.store.scripts import Script, run_command
from turnstream.types import (
    DeclaredColumn,
    Group,
    GroupOpened,
    Trajectory,
    TrajectoryKey,
    TrajectoryState,
)
from turnstream_server.bus.addresses import LEFT_OUT, Replay, address_letters, groups_of
from turnstream_server.bus.fixes import from_records
from turnstream_server.bus.histories import TrajectoryNotFoundError, history_of
from turnstream_server.bus.letters import LetterContent, open_letter
from turnstream_server.failpoints import reach

LEAVE_S: Final = 30.0
"""Longest wait of a replay for leave to start a group."""

_CLAIM = Script("claim_replay", "turnstream_server.bus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What became of a dead letter.

    Attributes:
        letter_id: of the dead trajectory.
        trajectory_id: what it was replayed as.
        state: of that, now. Its group decides about it: see its history.
        reason: why it is not trained; empty if it is, or may still be.
    """

    letter_id: str
    trajectory_id: str
    state: TrajectoryState
    reason: str


def replay_letters(
    url: str,
    run: str,
    letters: Mapping[str, Trajectory | None],
    *,
    as_group: str | None = None,
    leave_s: float = LEAVE_S,
) -> tuple[Replayed, ...]:
    """Write dead letters once more; the same again changes nothing and says what became of them.

    Args:
        url: of the store.
        run: name of the run.
        letters: ids of dead trajectories, and what to write in their place; None: as it is stored.
        as_group: the name of a new group that has these letters, and no others, as its samples, in
            their order. None: each goes into its own group.
        leave_s: how long to wait for leave to start that group.

    Raises:
        LetterNotFoundError: none of that name is kept.
        ConflictError: its group was decided without it, and no other is named; or it was replayed
            as something else; or somebody else replays it now.
        InvalidTurnError: what is to be written is refused at the door.
        RecordError: it is stored damaged, and nothing is given in its place.
        NotReadyError: the run gave no leave to start the group.
        StoreUnavailableError: the store cannot be reached.
    """
    with connect(url) as client:
        opened = {name: open_letter(client, run, name) for name in letters}
        done = _done(client, run, opened, as_group=as_group)
        if len(done) < len(opened):
            _, config = read_config(client, run)
            episodes = {
                name: _episode(opened[name], fixed, sample=sample, declared=config.extra_columns)
                for sample, (name, fixed) in enumerate(letters.items())
            }
            writer = _writer(episodes, config.extra_columns)
            replays = address_letters(
                client, run, opened, episodes, done=done, as_group=as_group, writer=writer
            )
            groups = groups_of(client, run, replays, as_group=as_group, num_letters=len(letters))
            with Publisher(url, run, writer=writer, admission_timeout_s=leave_s) as publisher:
                _write(client, run, publisher, replays, groups=groups, writer=writer)
        again = {name: open_letter(client, run, name) for name in letters}
        return tuple(
            _outcome(client, run, name, keys.parse_trajectory_id(content.letter.replayed_as))
            for name, content in again.items()
        )


def check_episode(
    episode: Trajectory, *, declared: Sequence[DeclaredColumn], name: str = "letter"
) -> None:
    """Make sure that the door would take a trajectory; nothing is written.

    Raises:
        InvalidTurnError: it would not, and why.
    """
    draft_group(_alone(episode, name=name), extra_columns=declared)


def _alone(episode: Trajectory, *, name: str) -> Group:
    """A group of nothing else; its name is never stored."""
    fields = {each: getattr(episode, each) for each in Trajectory.__slots__}
    return Group(group_id=name, trajectories=(Trajectory(**{**fields, "sample": 0}),))


def _done(
    client: redis.Redis, run: str, opened: Mapping[str, LetterContent], *, as_group: str | None
) -> set[str]:
    """Letters that were replayed before, where that stands.

    Raises:
        ConflictError: one of them was replayed into another group than is wanted now.
    """
    done: set[str] = set()
    for name, content in opened.items():
        before = content.letter.replayed_as
        if not before:
            continue
        key = keys.parse_trajectory_id(before)
        found = _outcome(client, run, name, key)
        if found.state is TrajectoryState.OPEN or found.state in LEFT_OUT:
            continue
        own = keys.parse_trajectory_id(name).group_id
        if key.group_id != (as_group or own):
            raise ConflictError(f"{name} was replayed as {before}, which is {found.state}")
        done.add(name)
    return done


def _episode(
    content: LetterContent,
    fixed: Trajectory | None,
    *,
    sample: int,
    declared: Sequence[DeclaredColumn],
) -> Trajectory:
    if fixed is not None:
        return fixed
    if content.seal is None:
        raise CorruptRecordError(f"its seal cannot be read: {content.seal_problem}; give a fix")
    if content.missing:
        raise CorruptRecordError(f"turn {content.missing[0]} is not stored; give a fix")
    for turn in content.turns:
        if turn.flaws:
            flaw = turn.flaws[0]
            raise CorruptRecordError(
                f"turn {turn.index}, bytes {flaw.start} to {flaw.stop}: {flaw.field} "
                f"{flaw.problem}; give a fix"
            )
    return from_records(content.records, sample=sample, seal=content.seal, declared=declared)


def _writer(episodes: Mapping[str, Trajectory], declared: Sequence[DeclaredColumn]) -> str:
    """Named after letters and content.

    So the same replay goes on where the last one stopped, and another one stays out of its way.
    """
    digest = hashlib.sha256()
    for name, episode in episodes.items():
        (drafted,) = draft_group(_alone(episode, name=name), extra_columns=declared)
        for turn in drafted.turns:
            digest.update(turn.record)
        digest.update(drafted.seal(1))  # names the letter too
    return f"replay-{digest.hexdigest()[:16]}"


def _write(
    client: redis.Redis,
    run: str,
    publisher: Publisher,
    replays: Sequence[Replay],
    *,
    groups: Mapping[str, GroupOpened],
    writer: str,
) -> None:
    with ExitStack() as stack:  # whatever is not sealed is given up
        writers = [
            stack.enter_context(_trajectory_writer(publisher, each, groups[each.letter_id]))
            for each in replays
        ]
        reach("replay.after_open")
        _claim(client, run, replays, writer=writer)
        reach("replay.after_claim")
        for each, trajectory in zip(replays, writers, strict=True):
            for receipt in [*_append(trajectory, each.episode)]:
                receipt.result()
        reach("replay.after_append")
        for each, trajectory in zip(replays, writers, strict=True):
            _seal(trajectory, each.episode)
        reach("replay.after_seal")


def _trajectory_writer(
    publisher: Publisher, replay: Replay, group: GroupOpened
) -> TrajectoryWriter:
    return publisher.trajectory(
        group.group_id,
        replay.key.sample,
        num_samples=group.num_samples,
        num_needed=group.num_needed,
        prompt_uid=group.prompt_uid,
        attempt=replay.key.attempt,
    )


def _claim(client: redis.Redis, run: str, replays: Sequence[Replay], *, writer: str) -> None:
    names = keys.run_keys(run)
    arguments: list[str] = [writer]
    for each in replays:
        arguments += (each.letter_id, keys.trajectory_id(each.key), each.lost)
    run_command(client, _CLAIM((names.ledger, names.letters), *arguments))


def _append(writer: TrajectoryWriter, episode: Trajectory) -> Iterator[Any]:
    for turn in episode.turns:
        yield writer.append(
            turn.prompt_ids,
            turn.response_ids,
            logprobs=turn.logprobs,
            loss_mask=turn.loss_mask,
            rewards=turn.rewards,
            version_runs=turn.version_runs,
            extras=turn.extras or None,
            anchor=turn.anchor,
            allow_empty=True,
        )


def _seal(writer: TrajectoryWriter, episode: Trajectory) -> None:
    writer.seal(
        episode.reward,
        reward_components=episode.reward_components,
        status=episode.status,
        sampling=episode.sampling,
        tags=episode.tags,
        metrics=episode.metrics,
        awaits_reward=episode.awaits_reward,
    )


def _outcome(client: redis.Redis, run: str, letter_id: str, key: TrajectoryKey) -> Replayed:
    name = keys.trajectory_id(key)
    try:
        history = history_of(client, run, key)
    except TrajectoryNotFoundError:  # claimed by one that died before it was opened again
        return Replayed(
            letter_id=letter_id, trajectory_id=name, state=TrajectoryState.ABANDONED, reason=""
        )
    return Replayed(
        letter_id=letter_id, trajectory_id=name, state=history.state, reason=history.reason
    )
