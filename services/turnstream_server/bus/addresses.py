"""Where a dead letter goes when it is replayed: which attempt of which sample, in which group."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import redis

from turnstream.errors import ConflictError
from turnstream.generator.checks import ATTEMPT_LIMIT
from turnstream.store import keys
from turnstream.store.replies import translating
from turnstream.types import GroupOpened, Trajectory, TrajectoryKey, TrajectoryState
from turnstream_server.bus.histories import TrajectoryNotFoundError, history_of
from turnstream_server.bus.letters import OVER, LetterContent
from turnstream_server.bus.pages import readable_events

LEFT_OUT: Final = frozenset(
    {TrajectoryState.ABANDONED, TrajectoryState.SURPLUS, TrajectoryState.INCOMPLETE}
)
"""States in which a replay ended before it was in a batch, so that its letter may have another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a dead letter is to become.

    Attributes:
        content: of the letter.
        episode: what is written in its place.
        key: as which trajectory.
        lost: an earlier replay that only compact records still name as left out; else empty.
    """

    content: LetterContent
    episode: Trajectory
    key: TrajectoryKey
    lost: str

    @property
    def letter_id(self) -> str:
        """Of the letter."""
        return self.content.letter.trajectory_id


def address_letters(
    client: redis.Redis,
    run: str,
    opened: Mapping[str, LetterContent],
    episodes: Mapping[str, Trajectory],
    *,
    done: Set[str],
    as_group: str | None,
    writer: str,
) -> list[Replay]:
    """What each letter becomes that was not replayed before.

    Args:
        client: of the store.
        run: name of the run.
        opened: the letters, in the order of their samples in a group of their own.
        episodes: what is written in their place.
        done: ids of those that were replayed before.
        as_group: the group of their own; None: each goes into its own group.
        writer: who writes them; where it has begun an attempt, it goes on with that.

    Raises:
        ConflictError: a letter's group was decided without it, or a sample has no attempt left.
        StoreUnavailableError: the store cannot be reached.
    """
    replays: list[Replay] = []
    for sample, (name, content) in enumerate(opened.items()):
        if name in done:
            continue
        key = keys.parse_trajectory_id(name)
        if as_group is None:
            _check_group(content)
            key = _free_attempt(client, run, key, writer=writer, first=key.attempt + 1)
        else:
            first = TrajectoryKey(as_group, sample)
            key = _free_attempt(client, run, first, writer=writer, first=0)
        lost = _lost(client, run, content.letter.replayed_as)
        replays.append(Replay(content=content, episode=episodes[name], key=key, lost=lost))
    return replays


def _check_group(content: LetterContent) -> None:
    state = content.letter.group_state
    if state != "open":
        name = keys.readable_name(content.letter.trajectory_id)
        what = "over" if state == OVER else state
        raise ConflictError(
            f"the group of {name} is already {what}, decided without it: name a new group to train "
            "it in"
        )


def _free_attempt(
    client: redis.Redis, run: str, key: TrajectoryKey, *, writer: str, first: int
) -> TrajectoryKey:
    """The first attempt of a sample that nobody has begun, or this writer."""
    ledger = keys.run_keys(run).ledger
    for attempt in itertools.islice(itertools.count(first), ATTEMPT_LIMIT - first):
        candidate = key._replace(attempt=attempt)
        with translating():
            entry: Any = client.hget(ledger, keys.trajectory_id(candidate))
        if entry is None or _is_open_for(entry, writer):
            return candidate
    raise ConflictError(f"{key} has no attempt left of {ATTEMPT_LIMIT}")


def _is_open_for(entry: bytes, writer: str) -> bool:
    state, _, rest = entry.decode().partition(":")
    return state == "open" and rest.partition(":")[2] == writer


def _lost(client: redis.Redis, run: str, before: str) -> str:
    """The name itself, where this earlier replay was left out, and only compact records say so."""
    if not before:
        return ""
    try:
        state = history_of(client, run, keys.parse_trajectory_id(before)).state
    except TrajectoryNotFoundError:
        return ""
    return before if state in LEFT_OUT else ""


def groups_of(
    client: redis.Redis,
    run: str,
    replays: Sequence[Replay],
    *,
    as_group: str | None,
    num_letters: int,
) -> dict[str, GroupOpened]:
    """By letter, the group that it goes into.

    Raises:
        ConflictError: the group is over.
        StoreUnavailableError: the store cannot be reached.
    """
    if as_group is not None:
        own = replays[0].content.letter.trajectory_id
        prompt_uid = _prompt_uid(client, run, keys.parse_trajectory_id(own).group_id)
        opened = GroupOpened(group_id=as_group, prompt_uid=prompt_uid, num_samples=num_letters)
        return dict.fromkeys((each.letter_id for each in replays), opened)
    return {each.letter_id: _stored_group(client, run, each.key.group_id) for each in replays}


def _stored_group(client: redis.Redis, run: str, group_id: str) -> GroupOpened:
    names, name = keys.run_keys(run), keys.encode_name(group_id)
    with translating():
        entry: Any = client.hget(names.groups, name)
        members: Any = client.hget(names.members, name)
    if entry is None:
        raise ConflictError(f"group {group_id!r} is finished")
    num_samples = int(entry.partition(b":")[0])
    num_needed = int((members or b"0").partition(b":")[0])
    return GroupOpened(
        group_id=group_id, prompt_uid="", num_samples=num_samples, num_needed=num_needed
    )


def _prompt_uid(client: redis.Redis, run: str, group_id: str) -> str:
    """Of a group, as far as events are kept."""
    for _, event in readable_events(client, run):
        if isinstance(event, GroupOpened) and event.group_id == group_id:
            return event.prompt_uid
    return ""
