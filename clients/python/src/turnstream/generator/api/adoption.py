"""Adoption of trajectories that another generator, or an earlier process, left open.

The order of the calls keeps two writers apart; see the header of generator/outbox/lua/append.lua.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from turnstream.batching.merge.merged_extras import whole_extras
from turnstream.batching.merge.merging import turn_prompts
from turnstream.errors import ConflictError, FencedError
from turnstream.generator.api.trajectory_writers import TrajectoryWriterBase
from turnstream.generator.encode.encoder import AdoptedTurn, TurnRecord
from turnstream.generator.requests import Adopt, AppendTurns, PostedSeal, PostSeals, ReadTurns
from turnstream.generator.transport.transport import BoundedCalls
from turnstream.records.turns import decode_turn
from turnstream.store.client import keys
from turnstream.store.client.replies import parse_refusal
from turnstream.store.run.budget import facts_of_seal
from turnstream.store.run.groups import Unfinished, most_attempts
from turnstream.types import DeclaredColumn, GroupOpened, TrajectoryKey, Turn

_logger = logging.getLogger(__name__)

HALF_WRITTEN: Final = "left half-written by an earlier process"
_POLL_S: Final = 1.0
"""Seconds between two attempts to adopt the samples of another writer."""

_Writer = TypeVar("_Writer", bound=TrajectoryWriterBase[Any, Any])


class Adopted(NamedTuple):
    """A trajectory of this writer, its lease epoch, its group's size and its stored turns."""

    epoch: int
    num_samples: int
    turns: tuple[AdoptedTurn, ...]


async def adopt_trajectory(
    calls: BoundedCalls,
    run: str,
    *,
    writer: str,
    key: TrajectoryKey,
    declared: Sequence[DeclaredColumn] = (),
) -> Adopted:
    """Adopt a lapsed trajectory for this writer, and read its turns. See `Publisher.adopt`.

    If the writer died between the seal and its event, the seal counts from now on.
    """
    name = keys.trajectory_id(key)
    epoch, num_samples = await calls.reply(Adopt(run, writer, name))
    # An append without a record fences earlier writers.
    await calls.reply(AppendTurns(run, writer, name, epoch))
    records, now_held, is_sealed = await calls.reply(ReadTurns(run, name))
    if now_held != epoch:
        whose = f"epoch {now_held}" if now_held else "nobody"
        raise FencedError(
            f"{keys.readable_name(name)} was adopted with epoch {epoch}, and is by now that of "
            f"{whose}: only that writer may continue it"
        )
    if is_sealed:
        seal = records[-1]
        posting = PostSeals(run, writer, [PostedSeal(name, epoch, *facts_of_seal(seal), seal)])
        raise _posted(name, (await calls.reply(posting))[0].decode())
    return Adopted(epoch, num_samples, adopted_turns(records, declared))


def _posted(name: str, answer: str) -> Exception:
    """Return the error of a trajectory whose earlier seal has just been posted."""
    if answer not in ("OK", "DUPLICATE", "SURPLUS"):
        return parse_refusal(answer).error
    return ConflictError(
        f"{keys.readable_name(name)} is sealed: its writer stored the seal before it was silent"
    )


def adopted_turns(
    records: Sequence[bytes], declared: Sequence[DeclaredColumn]
) -> tuple[AdoptedTurn, ...]:
    """Return the stored turns of a trajectory; RecordError if one is damaged."""
    stored = [decode_turn(record) for record in records]
    prompts, extras = turn_prompts(stored), whole_extras(stored, declared)
    return tuple(
        AdoptedTurn(
            TurnRecord(record, turn.shape),
            Turn(
                prompt_ids=prompt_ids,
                response_ids=turn.response_ids,
                logprobs=turn.logprobs,
                loss_mask=turn.loss_mask,
                rewards=turn.rewards,
                token_weights=turn.token_weights,
                version_runs=turn.version_runs,
                extras=columns,
                anchor=turn.anchor,
            ),
        )
        for record, turn, prompt_ids, columns in zip(records, stored, prompts, extras, strict=True)
    )


class Reopened(NamedTuple, Generic[_Writer]):
    """The unfinished samples of a group that an earlier process opened.

    Attributes:
        unopened: attempt to open, by sample.
        writers: writers of adopted samples without turns, by sample.
        halves: writers of half-written attempts. Another attempt of the sample replaces each; the
            group stays open for it until the half is abandoned.
    """

    unopened: dict[int, int]
    writers: dict[int, _Writer]
    halves: list[_Writer]


async def adopt_unfinished(
    group: GroupOpened,
    unfinished: Unfinished,
    *,
    is_written_here: Callable[[int], bool],
    adopt: Callable[[int, int], Awaitable[_Writer]],
) -> Reopened[_Writer]:
    """Adopt the open samples of a group; those that are half-written are tried again.

    A half-written sample that has all its attempts is only adopted. Leases of another writer are
    awaited. A sample is left to its writer if that renews the lease.
    """
    reopened = Reopened[_Writer](dict.fromkeys(unfinished.unopened, 0), {}, [])
    left_s = {(sample, 0): math.inf for sample in unfinished.open if not is_written_here(sample)}
    while left_s:
        for attempt, before_s in [*left_s.items()]:
            try:
                writer = await adopt(*attempt)
            except (ConflictError, FencedError) as error:
                lease_s = error.retry_after_s
                if lease_s is None or lease_s > before_s:
                    del left_s[attempt]
                    continue
                if before_s == math.inf:
                    _logger.info(
                        "group %s: sample %d belongs to another writer; its lease ends in %.0f s "
                        "unless it is renewed",
                        *(group.group_id, attempt[0], lease_s),
                    )
                left_s[attempt] = lease_s
                continue
            del left_s[attempt]
            following = _take(writer, reopened, unfinished.again, most=most_attempts(group))
            if following is not None:
                left_s[following] = math.inf
        await asyncio.sleep(min(_POLL_S, max(left_s.values(), default=0.0)))
    return reopened


def _take(
    writer: _Writer,
    reopened: Reopened[_Writer],
    again: Mapping[int, tuple[int, str]],
    *,
    most: int,
) -> tuple[int, int] | None:
    """Sort an adopted attempt into `reopened`; return the later attempt to adopt, if there is one.

    An attempt with turns is half-written: the next of at most `most` attempts starts its episode
    again.
    """
    key = writer.key
    if not writer.turns:
        reopened.writers[key.sample] = writer
        return None
    reopened.halves.append(writer)
    last, state = again.get(key.sample, (0, ""))
    if last > key.attempt and state == "open":
        return key.sample, last
    if last <= key.attempt or state == "abandoned":
        following, outcome = max(last, key.attempt) + 1, "starts again"
        if following < most:
            reopened.unopened[key.sample] = following
        else:
            outcome = f"is abandoned after {most} attempts, the most of its group"
        _logger.warning(
            "group %s: sample %d %s: an earlier process left it with %d turns, no seal",
            *(key.group_id, key.sample, outcome, len(writer.turns)),
        )
    return None
