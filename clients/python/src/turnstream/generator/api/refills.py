"""Refills: attempts that replace those that ended or hang, opened by a free generator."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence

from turnstream.errors import NotReadyError
from turnstream.generator.transport.steps import ReadWaits, Steps, until_woken
from turnstream.store.run.groups import (
    Refill,
    list_refills_command,
    open_refill_command,
    parse_refills,
)
from turnstream.store.waits.awaited import no_refill
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.types import TrajectoryKey

_MAX_LISTED = 32


def take_refill(
    run: str, *, writer: str, wait: StoreWait, tried: dict[TrajectoryKey, object]
) -> Steps[Refill]:
    """Open an attempt that was granted, as soon as there is one; one caller of several wins.

    Args:
        run: name of the run.
        writer: the writer that takes it.
        wait: deadline of the call.
        tried: attempts that calls for this writer have asked for, which all of them share. The
            store returns an attempt again to the writer that has it, so it cannot tell them apart.

    Raises:
        NotReadyError: there was none before the deadline.
        RunNotFoundError: no such run.
    """
    while True:
        listing = yield list_refills_command(run, max_count=_MAX_LISTED)
        wake_id, refills = parse_refills(listing)
        untried = _in_turn([each for each in refills if each.key not in tried], writer)
        for refill in untried:
            with _trying(refill.key, tried) as is_ours:
                if is_ours and _is_taken((yield open_refill_command(run, writer, refill))):
                    return refill
        wait.told(_none_left(refills))
        if wait.is_over:
            facts = yield ReadWaits(run)
            raise NotReadyError(wait.message, no_refill(facts, waited_s=wait.wait_s))
        if not untried:
            yield until_woken(run, wake_id, wait)


@contextlib.contextmanager
def _trying(key: TrajectoryKey, tried: dict[TrajectoryKey, object]) -> Iterator[bool]:
    """Whether no other call has asked for this attempt; one that fails may be asked for again."""
    own = object()
    is_ours = tried.setdefault(key, own) is own  # atomic: threads share it
    try:
        yield is_ours
    except BaseException:
        if is_ours:
            del tried[key]
        raise


def _in_turn(refills: Sequence[Refill], writer: str) -> Sequence[Refill]:
    """Return the refills in an order that differs by writer, so that few want the same one."""
    if not refills:
        return refills
    start = zlib.crc32(writer.encode()) % len(refills)
    return [*refills[start:], *refills[:start]]


def _is_taken(answers: Sequence[int | bytes]) -> bool:
    """Whether the attempt is ours: an epoch stands for yes, a text says whose it is."""
    return isinstance(answers[0], int)


def _none_left(refills: Sequence[Refill]) -> str:
    if not refills:
        return "no attempt was granted"
    return f"the {len(refills)} attempts that were granted are tried by others, or here"
