"""Adoption of trajectories that another generator, or an earlier process, left open. No I/O.

The order of the calls keeps two writers apart; see the header of generator/outbox/lua/append.lua.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from turnstream.batching.merge.merged_extras import whole_extras
from turnstream.batching.merge.merging import turn_prompts
from turnstream.errors import ConflictError, FencedError
from turnstream.generator.encode.encoder import TurnRecord
from turnstream.generator.transport.steps import Steps
from turnstream.records.turns import decode_turn
from turnstream.store.client import keys
from turnstream.store.client.replies import refusal
from turnstream.store.client.scripts import Script
from turnstream.store.run.budget import lease_of_seal
from turnstream.store.run.groups import Unfinished
from turnstream.store.run.leases import take_over_command
from turnstream.types import DeclaredColumn, TrajectoryKey, Turn

_APPEND = Script("append", "turnstream.generator.outbox")
_POST_SEALED = Script("post_sealed", "turnstream.generator.outbox")
_logger = logging.getLogger(__name__)

HALF_WRITTEN: Final = "left half-written by an earlier process"
POLL_S: Final = 1.0
"""Seconds between two attempts to adopt the samples of another writer."""


class AdoptedTurn(NamedTuple):
    """A turn that an earlier writer stored: as it is stored, and whole."""

    stored: TurnRecord
    turn: Turn


class Adopted(NamedTuple):
    """A trajectory of this writer, its lease epoch, its group's size and its stored turns."""

    epoch: int
    num_samples: int
    turns: tuple[AdoptedTurn, ...]


def adopt_trajectory(
    run: str, *, writer: str, key: TrajectoryKey, declared: Sequence[DeclaredColumn] = ()
) -> Steps[Adopted]:
    """Adopt a lapsed trajectory for this writer, and read its turns.

    Raises:
        ConflictError: its lease has not ended, which `retry_after_s` says, or it is not open.
            If the writer died between the seal and its event, the seal counts from now on.
        FencedError: another writer has adopted it.
        RecordError: a stored turn is damaged.
    """
    name = keys.trajectory_id(key)
    epoch, num_samples = yield take_over_command(run, name, writer=writer)
    payload = keys.trajectory_keys(run, name)
    yield _APPEND(payload, f"{epoch}:{writer}", 0, 0)  # without a record: fences earlier writers
    entries = yield ("XRANGE", payload.turns, "-", "+")
    # Read last: no other writer has added to the turns if the lease is still ours.
    holder, sealed = yield ("HMGET", payload.meta, "epoch", "sealed")
    if holder != b"%d" % epoch:
        whose = f"epoch {holder.decode()}" if holder else "nobody"
        raise FencedError(
            f"{keys.readable_name(name)} was adopted with epoch {epoch}, and is by now that of "
            f"{whose}: only that writer may continue it"
        )
    records = [fields[b"r"] for _, fields in entries]
    if sealed == b"1":
        lease = lease_of_seal(epoch, writer, records[-1])
        answers = yield _POST_SEALED(keys.run_keys(run).of_post_sealed, name, lease, records[-1])
        raise _posted(name, answers[0].decode())
    return Adopted(epoch, num_samples, adopted_turns(records, declared))


def _posted(name: str, answer: str) -> Exception:
    """Return the error of a trajectory whose earlier seal has just been posted."""
    if answer not in ("OK", "DUPLICATE", "SURPLUS"):
        return refusal(answer)
    return ConflictError(
        f"{keys.readable_name(name)} is sealed: its writer stored the seal before it was silent"
    )


def adopted_turns(
    records: Sequence[bytes], declared: Sequence[DeclaredColumn]
) -> tuple[AdoptedTurn, ...]:
    """Return the stored turns of a trajectory, in a run that declares these extra columns.

    Raises:
        RecordError: one of them is damaged.
    """
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
                version_runs=turn.version_runs,
                extras=columns,
                anchor=turn.anchor,
            ),
        )
        for record, turn, prompt_ids, columns in zip(records, stored, prompts, extras, strict=True)
    )


class AnyTrajectoryWriter(Protocol):
    """A trajectory writer, for threads or for asyncio."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Turns that were stored before this writer adopted the trajectory."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether it was sealed or abandoned."""
        ...

    def abandon(self, reason: str) -> object:
        """End the trajectory untrained."""
        ...


_Writer = TypeVar("_Writer", bound=AnyTrajectoryWriter)


class Reopening(Generic[_Writer]):
    """The adoption of the samples of a group that an earlier process opened.

    Attributes:
        unopened: samples that no generator has opened.
        pending: samples that are still to be adopted.
        writers: writers of adopted samples without turns, by sample.
    """

    def __init__(self, group_id: str, unfinished: Unfinished) -> None:
        self.unopened = unfinished.unopened
        self.pending = [*unfinished.begun]
        self.writers: dict[int, _Writer] = {}
        self._group_id = group_id
        self._left_s: dict[int, float] = {}

    @property
    def pause_s(self) -> float:
        """Seconds until the pending samples are worth another attempt; 0 if there are none."""
        return min(POLL_S, max((self._left_s[sample] for sample in self.pending), default=0.0))

    def skip(self, sample: int) -> None:
        """Leave a sample to its writer."""
        self.pending.remove(sample)

    def refused(self, sample: int, error: ConflictError | FencedError) -> None:
        """Wait for the end of the lease, or skip the sample if it has ended or is renewed."""
        left_s = error.retry_after_s if isinstance(error, ConflictError) else None
        if left_s is None or left_s > self._left_s.get(sample, math.inf):
            self.skip(sample)
            return
        if not self._left_s:
            _logger.info(
                "group %s belongs to another writer; its lease ends in %.0f s unless it is renewed",
                *(self._group_id, left_s),
            )
        self._left_s[sample] = left_s

    def adopted(self, sample: int, writer: _Writer) -> None:
        """Keep the writer of a sample without turns; abandon one that is half-written."""
        self.skip(sample)
        if not writer.turns:
            self.writers[sample] = writer
            return
        writer.abandon(HALF_WRITTEN)
        _logger.warning(
            "group %s: sample %d is abandoned: an earlier process left it with %d turns, no seal",
            *(self._group_id, sample, len(writer.turns)),
        )
