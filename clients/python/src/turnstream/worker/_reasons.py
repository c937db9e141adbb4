"""Reasons of a wait for a batcher, in the words of a generator's. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc

from turnstream.errors import (
    BatcherUnavailableError,
    TurnstreamError,
    UnavailableError,
    WaitKind,
    WaitReason,
)

_SILENT = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Statuses of a call that ended on this side, without a refusal."""


def no_batch(run: str, step: int, *, waited_s: float) -> WaitReason:
    """Return the reason of a wait for a mini-batch."""
    return WaitReason(
        WaitKind.NO_BATCH,
        f"step {step} of run {run} was waited for {waited_s:.0f} s",
        {"run": run, "step": step, "waited_s": waited_s},
    )


def not_acknowledged(what: str, *, waited_s: float) -> WaitReason:
    """Return the reason of a call without an answer."""
    return WaitReason(
        WaitKind.NOT_ACKNOWLEDGED,
        f"{what} is not acknowledged after {waited_s:.1f} s",
        {"call": what, "waited_s": waited_s},
    )


def batcher_silent(target: str, *, since_s: float) -> WaitReason:
    """Return the reason of a batcher that sends nothing."""
    return WaitReason(
        WaitKind.BATCHER_SILENT,
        f"the batcher at {target} was asked {since_s:.1f} s ago, and has not answered",
        {"address": target, "since_s": since_s},
    )


def is_answer(error: TurnstreamError) -> bool:
    """Return whether a failed call has an answer of the batcher."""
    return not isinstance(error, BatcherUnavailableError) or bool(error.reasons)


def is_silence(error: TurnstreamError) -> bool:
    """Return whether a failed call has ended on this side."""
    cause = error.__cause__
    return isinstance(cause, grpc.RpcError) and cast("grpc.Call", cause).code() in _SILENT


def of_failure(error: TurnstreamError, *, target: str, since_s: float) -> list[WaitReason]:
    """Return why a call failed: the reasons of the batcher, or why it sent none.

    `since_s` are the seconds since the last answer of `target`, or the first call.
    """
    if isinstance(error, UnavailableError) and error.reasons:
        return list(error.reasons)
    if is_silence(error):
        return [batcher_silent(target, since_s=since_s)]
    return [
        WaitReason(
            WaitKind.BATCHER_AWAY,
            f"the batcher at {target} has given nothing for {since_s:.1f} s: {error}",
            {"address": target, "since_s": since_s, "why": str(error)},
        )
    ]


def ended(error: TurnstreamError, reasons: Iterable[WaitReason]) -> TurnstreamError:
    """Return the same error, with the reasons of the wait that it ended."""
    if not isinstance(error, UnavailableError):
        return error
    return type(error)(error.message, reasons)
