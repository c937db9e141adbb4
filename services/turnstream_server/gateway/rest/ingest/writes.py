"""Writes of one request to groups and trajectories: their checks, and the writer that sends them.

The fields of an item are a mapping, whatever the form of the body. A field that is None, or is
missing, has its default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from turnstream.errors import (
    FencedError,
    InvalidTurnError,
    StoreUnavailableError,
    TurnstreamError,
)
from turnstream.generator import AsyncReceipt, AsyncTrajectoryWriter
from turnstream.generator.encode.checks import checked_turn, with_checked_extras
from turnstream.generator.encode.group_checks import (
    checked_key,
    checked_metrics,
    checked_opening,
    checked_reward,
    checked_siblings,
    checked_status,
    checked_tags,
)
from turnstream.types import (
    DeclaredColumn,
    GroupOpened,
    Purpose,
    Siblings,
    Status,
    TrajectoryKey,
    Turn,
    VersionRun,
)
from turnstream.types.names import flag, named_numbers
from turnstream_server.gateway.rest.bodies import MAX_MEMBERS_OF_GROUPS

Fields = Mapping[str, Any]
_Given = TypeVar("_Given")
_Checked = TypeVar("_Checked")

STORE_TIMEOUT_S: Final = 5.0
"""Time for which a store may be away or full before a request fails; its client then repeats it."""

_DROPPED: Final = "the gateway has dropped it: its client was silent, or too many others are open"

_OF_TURNS: Final = (
    *("prompt_ids", "response_ids", "logprobs", "loss_mask", "token_weights", "rewards"),
    *("reward", "policy_version", "anchor", "call_id"),
)


class Opening(NamedTuple):
    """A group to open, and the members to open with it."""

    group: GroupOpened
    members: list[TrajectoryKey]


class WrittenTurn(NamedTuple):
    """A turn, and its extra columns as they were sent: only the run knows their types."""

    turn: Turn
    extras: Fields | None

    def checked(self, columns: Sequence[DeclaredColumn]) -> Turn:
        """Return the turn with its extra columns, as the run declares them."""
        return with_checked_extras(self.turn, _shaped(self.extras, columns), columns)


class Seal(NamedTuple):
    """The end of a finished trajectory. The attributes are those of `TrajectoryWriter.seal`.

    `superseded` are indexes of turns, as in `left_out`; no request has them.
    """

    reward: float | None = None
    reward_components: Mapping[str, float] | None = None
    status: Status | str = Status.COMPLETED
    sampling: Mapping[str, float] | None = None
    tags: Mapping[str, str] | None = None
    metrics: Mapping[str, float] | None = None
    awaits_reward: bool = False
    siblings: Siblings = "train"
    superseded: Collection[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Write:
    """One item of a request: turns of a trajectory, and perhaps its end.

    Attributes:
        item: place in the request, from 0.
        key: the trajectory.
        group: its group as it is to be opened; None if it must be open already.
        first: index of the first turn; None if there is no turn.
        turns: consecutive turns; may be empty.
        seal: its end; None if it stays open, or is abandoned.
        abandon_reason: why it is abandoned; None if it is not.
    """

    item: int
    key: TrajectoryKey
    group: GroupOpened | None = None
    first: int | None = None
    turns: Sequence[WrittenTurn] = ()
    seal: Seal | None = None
    abandon_reason: str | None = None

    @property
    def state(self) -> str:
        """Return the state of the trajectory after this write."""
        if self.abandon_reason is not None:
            return "abandoned"
        if self.seal is None:
            return "open"
        return "awaiting_reward" if self.seal.awaits_reward else "sealed"

    @property
    def can_open(self) -> bool:
        """Whether it may be the first write: a first turn, or an end without one after an error."""
        is_failed = self.first is None and self.seal and self.seal.status is Status.ERROR
        return self.group is not None and (self.first == 0 or bool(is_failed))


class IngestWriter(AsyncTrajectoryWriter):
    """The writer of one open trajectory. A write returns its receipt at once.

    `num_turns` includes stored turns of an adopted trajectory, `num_bytes` are those of all tokens.
    """

    num_turns: int = 0
    num_bytes: int = 0

    def count_stored(self) -> None:
        """Count the turns of an adopted trajectory, which are in the draft."""
        self.num_turns, self.num_bytes = len(self._turns), sum(map(_num_bytes, self._turns))
        self._turns = ()

    @property
    def num_samples(self) -> int:
        """Return the size of its group."""
        return self._group.num_samples

    @property
    def error(self) -> TurnstreamError | None:
        """Return why it takes no writes any more; None while it does."""
        return None if self._queue is None else self._queue.error

    async def add(self, written: WrittenTurn, *, is_last: bool = False) -> AsyncReceipt:
        """Send the next turn; return its receipt. The tokens of the last turn are not kept.

        A turn with the call id of an earlier one is not sent, and its receipt is that of this turn.
        Raises the error of a wrong extra column, of an end, or of an earlier write.
        """
        turn = written.checked(await self._sender.learn_columns())
        receipt = self._sender.receipt()
        async with self._order:
            queue = await self._open()
            if (earlier := self._receipt_of(turn)) is not None:
                return earlier
            if not (has_capacity := self._has_capacity(turn))():
                await self._sender.wait_for_capacity(has_capacity, timeout_s=STORE_TIMEOUT_S)
            self._put_turn(queue, turn, receipt, is_last=is_last)
        self.num_turns += 1
        self.num_bytes += _num_bytes(turn)
        return receipt

    async def finish(self, seal: Seal) -> AsyncReceipt:
        """End the trajectory; return the receipt of the end. Errors as of `add`."""
        end = self._sender.loop_receipt()
        async with self._order:
            queue = await self._open()
            made = self._drafted.seal(**seal._asdict())
            self._sender.put(lambda: self._outbox.seal(queue, made, end=end))
            self._has_ended = True
        return end

    def drop(self) -> None:
        """Stop to renew the lease, without an end. No write may be on its way."""
        queue = self._queue
        if queue is None or queue.error is not None or self._has_ended:
            return
        with contextlib.suppress(StoreUnavailableError):  # the publisher is closed
            self._sender.put(lambda: self._outbox.tracker.end(queue, FencedError(_DROPPED)))


def key_of(fields: Fields) -> TrajectoryKey:
    """Return the checked key of an item."""
    key = TrajectoryKey(fields["group_id"], fields["sample"], fields.get("attempt") or 0)
    return checked_key(key, num_samples=fields.get("num_samples"))


def group_of(fields: Fields) -> GroupOpened:
    """Return the checked group of an item that has `num_samples`."""
    purpose = fields.get("purpose")
    return checked_opening(
        fields["group_id"],
        fields["num_samples"],
        fields.get("prompt_uid") or "",
        num_needed=fields.get("num_needed"),
        purpose=Purpose.TRAIN if purpose is None else purpose,
    )


def opening_of(fields: Fields) -> Opening:
    """Return the checked opening of an item; without samples, that of all members."""
    group, samples = group_of(fields), fields.get("samples")
    members = [
        checked_key(TrajectoryKey(group.group_id, sample), num_samples=group.num_samples)
        for sample in (range(group.num_samples) if samples is None else samples)
    ]
    return Opening(group, list(dict.fromkeys(members)))


def turn_of(fields: Fields, *, extras: Fields | None) -> WrittenTurn:
    """Return the checked turn of an item; `version_runs` are mappings."""
    runs = fields.get("version_runs") or ()
    turn = checked_turn(
        **{name: fields.get(name) for name in _OF_TURNS},
        version_runs=[VersionRun(each["version"], each["num_tokens"]) for each in runs],
        allow_empty=fields.get("allow_empty") or False,
    )
    return WrittenTurn(turn, extras)


def seal_of(fields: Fields) -> Seal:
    """Return the checked seal of an item."""
    names = [name for name in Seal._fields if name != "superseded"]
    given = {name: fields[name] for name in names if fields.get(name) is not None}
    seal = Seal(**given)
    awaits_reward = flag(seal.awaits_reward, field="awaits_reward")
    return seal._replace(
        reward=checked_reward(seal.reward, awaits_reward=awaits_reward),
        reward_components=named_numbers(seal.reward_components, field="reward_components"),
        status=checked_status(seal.status),
        sampling=named_numbers(seal.sampling, field="sampling"),
        tags=checked_tags(seal.tags),
        metrics=checked_metrics(seal.metrics),
        awaits_reward=awaits_reward,
        siblings=checked_siblings(seal.siblings),
    )


def checked_items(
    numbered: Iterable[tuple[int, _Given]],
    check: Callable[[int, _Given], _Checked],
    *,
    place: str = "items",
) -> list[_Checked]:
    """Return the results of a check, whose errors name the place and the number of the item."""
    checked: list[_Checked] = []
    for number, given in numbered:
        with named_fields(place, number):
            checked.append(check(number, given))
    return checked


@contextlib.contextmanager
def named_fields(*path: str | int) -> Iterator[None]:
    """Put a path before the field of an InvalidTurnError, as in `items.3.logprobs`."""
    try:
        yield
    except InvalidTurnError as error:
        field = ".".join([*map(str, path), error.field])
        raise InvalidTurnError(field, error.message) from error


def check_num_members(groups: Iterable[Fields]) -> None:
    """Refuse groups with too many members, before any member is made."""
    count = 0
    for each in groups:
        samples = each.get("samples")
        is_listed = isinstance(samples, list | np.ndarray)
        count += len(samples) if is_listed else each["num_samples"]
    if count > MAX_MEMBERS_OF_GROUPS:
        raise InvalidTurnError(
            "samples",
            f"the request opens {count} trajectories, more than {MAX_MEMBERS_OF_GROUPS}: send "
            "fewer groups, or name fewer samples",
        )


def _num_bytes(turn: Turn) -> int:
    return 4 * (len(turn.prompt_ids) + len(turn.response_ids))


def _shaped(extras: Fields | None, columns: Sequence[DeclaredColumn]) -> Fields | None:
    """Return extra columns with flat arrays in the shapes of their values.

    A column of an Arrow stream is a flat list. An array that does not fit is left to the checks.
    """
    if not extras:
        return extras
    shapes = {column.name: column.shape for column in columns}

    def shaped(name: str, values: Any) -> Any:
        shape = shapes.get(name, ())
        is_flat = isinstance(values, np.ndarray) and values.ndim == 1
        if not shape or not is_flat or len(values) % int(np.prod(shape)):
            return values
        return values.reshape(-1, *shape)

    return {name: shaped(name, values) for name, values in extras.items()}
