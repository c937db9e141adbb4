"""Taking over what another generator left open: from the ledger, then from the payload.

The order is what keeps two writers apart; see the header of generator/outbox/lua/append.lua.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from turnstream.batching.merge.merged_extras import whole_extras
from turnstream.batching.merge.merging import turn_prompts
from turnstream.errors import ConflictError, FencedError
from turnstream.generator.transport.steps import Steps
from turnstream.records.turns import decode_turn
from turnstream.store.client import keys
from turnstream.store.client.replies import refusal
from turnstream.store.client.scripts import Command, Script
from turnstream.store.run.budget import lease_of_seal
from turnstream.store.run.leases import take_over_command
from turnstream.types import DeclaredColumn, TrajectoryKey, Turn, TurnShape

_APPEND = Script("append", "turnstream.generator.outbox")
_POST_SEALED = Script("post_sealed", "turnstream.generator.outbox")
_WHOSE = ("epoch", "sealed")


class TakenTurn(NamedTuple):
    """A turn that was stored before.

    Attributes:
        record: as it is stored.
        turn: the same, whole.
        shape: its lengths.
    """

    record: bytes
    turn: Turn
    shape: TurnShape


class Taken(NamedTuple):
    """A trajectory that belongs to this writer now.

    Attributes:
        epoch: its lease epoch.
        num_samples: number of samples of its group.
        turns: turns that its writers have stored so far.
    """

    epoch: int
    num_samples: int
    turns: tuple[TakenTurn, ...]


def take_over(
    run: str, *, writer: str, key: TrajectoryKey, declared: Sequence[DeclaredColumn] = ()
) -> Steps[Taken]:
    """Adopt a lapsed trajectory for this writer, and read its turns.

    Args:
        run: name of the run.
        writer: the writer that adopts it.
        key: name of the trajectory.
        declared: extra columns of the run.

    Raises:
        ConflictError: its lease has not ended, which `retry_after_s` says, or it is not open.
            If the writer died between the seal and its event, the seal counts from now on.
        FencedError: another writer has adopted it.
        RecordError: a stored turn is damaged.
    """
    name = keys.trajectory_id(key)
    epoch, num_samples = yield take_over_command(run, name, writer=writer)
    yield _fence(run, name, lease=f"{epoch}:{writer}")
    payload = keys.trajectory_keys(run, name)
    entries = yield ("XRANGE", payload.turns, "-", "+")
    meta = yield ("HMGET", payload.meta, *_WHOSE)  # last: see _is_sealed
    records = [fields[b"r"] for _, fields in entries]
    if _is_sealed(name, meta, epoch=epoch):
        answers = yield _post(run, name, lease=(epoch, writer), seal=records[-1])
        raise _posted(name, answers)
    return Taken(epoch, num_samples, taken_turns(records, declared))


def _fence(run: str, name: str, *, lease: str) -> Command:
    """Return a first append without a record, which fences earlier writers off."""
    return _APPEND(keys.trajectory_keys(run, name), lease, 0, 0)


def _is_sealed(name: str, meta: Sequence[bytes | None], *, epoch: int) -> bool:
    """Whether what was read before `meta` ends with a seal.

    No other writer has added to it or released it, if the lease is still ours afterwards.

    Raises:
        FencedError: it is not.
    """
    holder, sealed = meta
    if holder != b"%d" % epoch:
        whose = f"epoch {holder.decode()}" if holder else "nobody"
        raise FencedError(
            f"{keys.readable_name(name)} was taken over with epoch {epoch}, and is by now that of "
            f"{whose}: only that writer may continue it"
        )
    return sealed == b"1"


def _post(run: str, name: str, *, lease: tuple[int, str], seal: bytes) -> Command:
    epoch, writer = lease
    words = lease_of_seal(epoch, writer, seal)
    return _POST_SEALED(keys.run_keys(run).of_post_sealed, name, words, seal)


def _posted(name: str, answers: Sequence[bytes]) -> Exception:
    """Return the error of a trajectory whose earlier seal has just been posted."""
    text = answers[0].decode()
    if text not in ("OK", "DUPLICATE", "SURPLUS"):
        return refusal(text)
    return ConflictError(
        f"{keys.readable_name(name)} is sealed: its writer stored the seal before it was silent"
    )


def taken_turns(
    records: Sequence[bytes], declared: Sequence[DeclaredColumn]
) -> tuple[TakenTurn, ...]:
    """The stored turns of a trajectory, whole, in a run that declares these extra columns.

    Raises:
        RecordError: one of them is damaged.
    """
    stored = [decode_turn(record) for record in records]
    return tuple(
        TakenTurn(
            record,
            Turn(
                prompt_ids=prompt_ids,
                response_ids=turn.response_ids,
                logprobs=turn.logprobs,
                loss_mask=turn.loss_mask,
                rewards=turn.rewards,
                version_runs=turn.version_runs,
                extras=extras,
                anchor=turn.anchor,
            ),
            turn.shape,
        )
        for record, turn, prompt_ids, extras in zip(
            records, stored, turn_prompts(stored), whole_extras(stored, declared), strict=True
        )
    )
