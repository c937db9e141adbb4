"""Records of one trajectory: numbered turns without the tokens of earlier turns, and the seal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from turnstream.batching.merge.left_out import left_out
from turnstream.batching.merge.merging import (
    ExtraIndex,
    LinkedTurn,
    anchor_hash,
    plan_sequences,
    stored_turn,
)
from turnstream.batching.merge.prefix import NO_MATCHES, PrefixIndex, PrefixMatch
from turnstream.errors import ConflictError, InvalidTurnError
from turnstream.generator.encode import checks, group_checks
from turnstream.records.events import MAX_EVENT_BYTES, MAX_TURNS, SealedTurn, seal_writer
from turnstream.records.turns import encode_checked
from turnstream.types import (
    DeclaredColumn,
    Group,
    GroupOpened,
    Siblings,
    Status,
    Trajectory,
    TrajectoryKey,
    Turn,
    TurnShape,
    VersionRun,
)
from turnstream.types.names import flag, named_numbers

SealMaker = Callable[[int], bytes]
"""Returns the record of the seal for a lease epoch, which is known once the trajectory is open."""


class TurnRecord(NamedTuple):
    """An encoded turn."""

    record: bytes
    shape: TurnShape


class DraftedSeal(NamedTuple):
    """The end of a trajectory."""

    make: SealMaker
    merged_tokens: int
    awaits_reward: bool


class AdoptedTurn(NamedTuple):
    """A turn that an earlier writer stored: as it is stored, and whole."""

    stored: TurnRecord
    turn: Turn


class TrajectoryDraft:
    """Makes the records of one trajectory, in order. Not thread-safe; no I/O.

    A refused turn does not change the draft.
    """

    def __init__(self, key: TrajectoryKey, *, extra_columns: Sequence[DeclaredColumn] = ()) -> None:
        self.key = key
        self._index: PrefixIndex | None = None  # a trajectory of one turn has none
        self._extras = ExtraIndex(extra_columns)
        self._turns: list[SealedTurn] = []
        self._num_bytes = 0
        self._without_logprobs: set[int] = set()  # turns with trained tokens
        self._calls: dict[str, bytes] = {}  # digests of the turns with these ids
        self._call_ids: dict[str, int] = {}

    def add(self, turn: Turn) -> TurnRecord:
        """Encode the next turn, and keep its tokens for the turns that follow."""
        linked = self._link(turn)
        made = self._encode(turn, linked)
        self._known.add(linked.match, turn.prompt_ids, turn.response_ids)
        self._extras.add(turn, linked)
        return made

    def add_last(self, turn: Turn) -> TurnRecord:
        """Encode the next turn, which none follows; its tokens are not kept."""
        linked = self._link(turn)
        made = self._encode(turn, linked)
        self._extras.add(turn, linked)
        return made

    def restore(self, turn: Turn, stored: TurnRecord) -> None:
        """Continue after a stored turn, with its links as they are stored."""
        turn = self._extras.as_stored(turn)
        match = PrefixMatch(stored.shape.parent_turn, stored.shape.shared_tokens)
        linked = self._extras.link(turn, [match])
        self._known.add(match, turn.prompt_ids, turn.response_ids)
        self._extras.add(turn, linked)
        self._remember(turn, stored, anchor_hash(turn.anchor))

    @property
    def call_ids(self) -> Mapping[str, int]:
        """The turns that have ids of model calls, by id."""
        return MappingProxyType(self._call_ids)

    def is_repeated(self, turn: Turn) -> bool:
        """Return whether the draft has the turn of this call; ConflictError if it is another."""
        number = self._call_ids.get(turn.call_id) if turn.call_id is not None else None
        if number is None or turn.call_id is None:
            return False
        if self._calls[turn.call_id] != _call_digest(turn):
            raise ConflictError(
                f"turn {number} of {self.key.readable_name} has the call_id {turn.call_id!r}, with "
                "another prompt or response"
            )
        return True

    def seal(
        self,
        *,
        reward: float | None,
        reward_components: Mapping[str, float] | None,
        status: Status | str,
        sampling: Mapping[str, float] | None,
        tags: Mapping[str, str] | None,
        metrics: Mapping[str, float] | None,
        awaits_reward: bool = False,
        siblings: Siblings = "train",
        superseded: Collection[int] = (),
    ) -> DraftedSeal:
        """Check the fields of the whole trajectory, and return its seal.

        `superseded` and `siblings` name turns that are left out of the rows, as in `left_out`.
        """
        status = group_checks.checked_status(status)
        group_checks.require_turns(len(self._turns), status)
        awaits_reward = flag(awaits_reward, field="awaits_reward")
        reward = group_checks.checked_reward(reward, awaits_reward=awaits_reward)
        components = named_numbers(reward_components, field="reward_components")
        sampling = named_numbers(sampling, field="sampling")
        metrics = group_checks.checked_metrics(metrics)
        tags = group_checks.checked_tags(tags)

        turns = self._sealed_turns(siblings, superseded)
        # One version, or an unknown one, that sampled all trained tokens is not repeated by turn.
        sampled = {version for turn in turns for version, _ in turn.versions}
        has_versions = len(sampled) > 1
        known = [version for version in sampled if version is not None]
        make_seal = seal_writer(
            self.key,
            turns,
            has_versions=has_versions,
            status=status.value,
            reward=reward,
            reward_components=components or None,
            oldest_version=min(known, default=None),
            newest_version=max(known, default=None),
            num_payload_bytes=self._num_bytes,
            has_logprobs=not any(turns[number].versions for number in self._without_logprobs),
            sampling=sampling or None,
            tags=tags or None,
            metrics=metrics or None,
            awaits_reward=awaits_reward,
        )
        # Seals of fewer turns and versions are far below the limit, whatever their labels are.
        num_versions = sum([len(turn.versions) for turn in turns]) if has_versions else 0
        if len(turns) + num_versions > MAX_TURNS:
            num_bytes = len(make_seal(1))
            if num_bytes > MAX_EVENT_BYTES:
                raise InvalidTurnError(
                    "version_runs",
                    f"the seal of the trajectory has {num_bytes} bytes, more than "
                    f"{MAX_EVENT_BYTES}",
                )
        return DraftedSeal(make_seal, _merged_tokens(turns), awaits_reward)

    @property
    def merged_tokens(self) -> int:
        """Tokens of the rows that the turns merge to."""
        return _merged_tokens(self._turns)

    def _sealed_turns(
        self, siblings: Siblings, superseded: Collection[int]
    ) -> Sequence[SealedTurn]:
        """Return the turns as the seal has them: nothing of those that are left out is trained."""
        unused = left_out(
            [turn.shape for turn in self._turns],
            siblings=group_checks.checked_siblings(siblings),
            superseded=superseded,
            others=self._extras.items,
        )
        if not unused:
            return self._turns
        return [
            _as_left_out(turn) if number in unused else turn
            for number, turn in enumerate(self._turns)
        ]

    @property
    def _known(self) -> PrefixIndex:
        if self._index is None:
            self._index = PrefixIndex()
        return self._index

    def _link(self, turn: Turn) -> LinkedTurn:
        matches = NO_MATCHES if self._index is None else self._index.matches(turn.prompt_ids)
        return self._extras.link(turn, matches)

    def _encode(self, turn: Turn, linked: LinkedTurn) -> TurnRecord:
        index = len(self._turns)
        if index >= MAX_TURNS:
            raise InvalidTurnError("turn", f"is number {index + 1}, more than {MAX_TURNS} turns")
        (parent, shared), pieces = linked
        prompt, response, mask = turn.prompt_ids[shared:], turn.response_ids, turn.loss_mask
        num_response = len(response)
        num_trained = num_response if mask is None else int(np.count_nonzero(mask))
        shape = TurnShape(parent, shared, len(prompt), num_response, num_trained)
        anchor = anchor_hash(turn.anchor)
        record = encode_checked(turn, index, shape, (prompt, response), pieces, anchor)
        if len(record) > checks.MAX_RECORD_BYTES:
            checks.check_record(record, stored_turn(turn, linked, index=index))
        made = TurnRecord(record, shape)
        self._remember(turn, made, anchor)
        return made

    def _remember(self, turn: Turn, made: TurnRecord, anchor: int | None) -> None:
        record, shape = made
        reward = 0.0 if turn.rewards is None else float(turn.rewards.sum(dtype=np.float64))
        versions = _trained_versions(turn, num_trained=shape.num_trained_tokens)
        crc = int.from_bytes(record[-4:], "little")
        number = len(self._turns)
        self._turns.append(SealedTurn(shape, reward, crc, versions, anchor))
        self._num_bytes += len(record)
        if turn.logprobs is None and shape.num_trained_tokens:
            self._without_logprobs.add(number)
        if turn.call_id is not None:
            self._call_ids[turn.call_id] = number
            self._calls[turn.call_id] = _call_digest(turn)


def _merged_tokens(turns: Sequence[SealedTurn]) -> int:
    if len(turns) == 1:
        return turns[0].shape.num_tokens
    return sum(row.num_tokens for row in plan_sequences([t.shape for t in turns], merge=True))


def _as_left_out(turn: SealedTurn) -> SealedTurn:
    shape = turn.shape._replace(num_trained_tokens=0, is_left_out=True)
    return turn._replace(shape=shape, reward=0.0, versions=())


def _call_digest(turn: Turn) -> bytes:
    """Return a digest of prompt and response."""
    digest = hashlib.blake2b(np.ascontiguousarray(turn.prompt_ids).data, digest_size=16)
    digest.update(len(turn.prompt_ids).to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(turn.response_ids).data)
    return digest.digest()


def _trained_versions(turn: Turn, *, num_trained: int) -> tuple[VersionRun, ...]:
    """Return the number of trained tokens by version, ascending, the unknown one first."""
    if num_trained == 0:
        return ()
    if len(turn.version_runs) <= 1:
        version = turn.version_runs[0].version if turn.version_runs else None
        return (VersionRun(version, num_trained),)
    counts: dict[int | None, int] = {}
    start = 0
    for version, num_tokens in turn.version_runs:
        stop = start + num_tokens
        trained = num_tokens
        if turn.loss_mask is not None:
            trained = int(np.count_nonzero(turn.loss_mask[start:stop]))
        if trained:
            counts[version] = counts.get(version, 0) + trained
        start = stop
    known = sorted([(v, n) for v, n in counts.items() if v is not None])
    unknown = [VersionRun(None, counts[None])] if None in counts else []
    return (*unknown, *[VersionRun(version, count) for version, count in known])


class DraftedTrajectory(NamedTuple):
    """A whole trajectory, encoded but for its seal."""

    key: TrajectoryKey
    turns: list[TurnRecord]
    seal: DraftedSeal


class DraftedGroup(NamedTuple):
    """A whole group, encoded."""

    opening: GroupOpened
    trajectories: list[DraftedTrajectory]

    @property
    def num_bytes(self) -> int:
        """Bytes of the records of all turns."""
        return sum(len(turn.record) for made in self.trajectories for turn in made.turns)


def draft_group(group: Group, *, extra_columns: Sequence[DeclaredColumn] = ()) -> DraftedGroup:
    """Check and encode every trajectory of a finished group, in order of their samples."""
    opening, members = group_checks.checked_group(group)
    return DraftedGroup(
        opening, [_draft_trajectory(group.group_id, each, extra_columns) for each in members]
    )


def _draft_trajectory(
    group_id: str, trajectory: Trajectory, declared: Sequence[DeclaredColumn]
) -> DraftedTrajectory:
    number: int | None = None  # of the turn that is checked
    key = TrajectoryKey(group_id, trajectory.sample, trajectory.attempt)
    draft = TrajectoryDraft(key, extra_columns=declared)
    turns: list[TurnRecord] = []
    try:
        group_checks.checked_attempt(key.attempt)
        group_checks.check_list_of(trajectory.turns, Turn, field="turns")
        last = len(trajectory.turns) - 1
        for number, turn in enumerate(trajectory.turns):
            add = draft.add_last if number == last else draft.add
            checked = _rechecked(turn)
            if not draft.is_repeated(checked):
                turns.append(add(checks.with_checked_extras(checked, turn.extras, declared)))
        number = None
        seal = draft.seal(
            reward=trajectory.reward,
            reward_components=trajectory.reward_components,
            status=trajectory.status,
            sampling=trajectory.sampling,
            tags=trajectory.tags,
            metrics=trajectory.metrics,
            awaits_reward=trajectory.awaits_reward,
            siblings=trajectory.siblings,
        )
    except InvalidTurnError as error:
        where = f"trajectories[{trajectory.sample}]" + (
            "" if number is None else f".turns[{number}]"
        )
        raise InvalidTurnError(f"{where}.{error.field}", error.message) from error
    return DraftedTrajectory(key, turns, seal)


def _rechecked(turn: Turn) -> Turn:
    """Return the same turn, its arrays checked; an empty response is taken as meant."""
    return checks.checked_turn(
        turn.prompt_ids,
        turn.response_ids,
        logprobs=turn.logprobs,
        loss_mask=turn.loss_mask,
        token_weights=turn.token_weights,
        rewards=turn.rewards,
        version_runs=turn.version_runs,
        anchor=turn.anchor,
        call_id=turn.call_id,
        allow_empty=True,
    )
