"""Taking refills: attempts that stand in for those that ended or hang, begun by whoever is free."""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import redis
import redis.asyncio

from turnstream.errors import NotReadyError, WaitKind
from turnstream.store import keys
from turnstream.store.asking import StoreWait
from turnstream.store.groups import (
    Refill,
    list_refills_command,
    open_refill_command,
    parse_refills,
)
from turnstream.store.scripts import run_command, run_command_async
from turnstream.store.wait_reasons import no_refill
from turnstream.store.waits import WaitFacts
from turnstream.types import TrajectoryKey

_MAX_LISTED = 32


def wait_for_refill(
    client: redis.Redis | redis.asyncio.Redis,
    run: str,
    *,
    wait_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> StoreWait:
    """The wait of a call that takes a refill; see StoreWait."""
    what = f"run {run!r}: no sample was to be tried again"
    return StoreWait(client, WaitKind.NO_REFILL, what, wait_s=wait_s, clock=clock)


def take_refill(
    client: redis.Redis,
    run: str,
    *,
    writer: str,
    timeout_s: float,
    tried: dict[TrajectoryKey, object] | None = None,
) -> Refill:
    """Open an attempt that was granted, as soon as there is one; of many who try, one wins.

    Args:
        client: of the store.
        run: name of the run.
        writer: who takes it.
        timeout_s: longest wait.
        tried: attempts that calls for this writer have asked for, which all of them share: the
            store gives an attempt to the writer that has it again, so that it cannot tell them
            apart.

    Raises:
        NotReadyError: there was none within `timeout_s`.
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached, or did not answer by then.
    """
    wait = wait_for_refill(client, run, wait_s=timeout_s)
    tried = {} if tried is None else tried
    while True:
        with wait.asking():
            listing = run_command(client, list_refills_command(run, max_count=_MAX_LISTED))
        wake_id, refills = parse_refills(listing)
        untried = _in_turn([each for each in refills if each.key not in tried], writer)
        for refill in untried:
            with _trying(refill.key, tried) as is_ours, wait.asking():
                command = open_refill_command(run, writer, refill)
                if is_ours and _is_taken(run_command(client, command)):
                    return refill
        wait.told(_none_left(refills))
        if wait.is_over:
            raise _none_came(wait, wait.look(client, run))
        if not untried:
            with wait.asking():
                client.xread({keys.run_keys(run).wake: wake_id}, block=wait.block_ms)


async def take_refill_async(
    client: redis.asyncio.Redis,
    run: str,
    *,
    writer: str,
    timeout_s: float,
    tried: dict[TrajectoryKey, object] | None = None,
) -> Refill:
    """The same as `take_refill`, for asyncio."""
    clock = asyncio.get_running_loop().time
    wait = wait_for_refill(client, run, wait_s=timeout_s, clock=clock)
    tried = {} if tried is None else tried
    listed = list_refills_command(run, max_count=_MAX_LISTED)
    while True:
        async with wait.asking_async():
            listing = await run_command_async(client, listed)
        wake_id, refills = parse_refills(listing)
        untried = _in_turn([each for each in refills if each.key not in tried], writer)
        for refill in untried:
            with _trying(refill.key, tried) as is_ours:
                async with wait.asking_async():
                    command = open_refill_command(run, writer, refill)
                    if is_ours and _is_taken(await run_command_async(client, command)):
                        return refill
        wait.told(_none_left(refills))
        if wait.is_over:
            raise _none_came(wait, await wait.look_async(client, run))
        if not untried:
            async with wait.asking_async():
                await client.xread({keys.run_keys(run).wake: wake_id}, block=wait.block_ms)


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
    """The same refills, begun elsewhere by every writer, so that not all of them want the first."""
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


def _none_came(wait: StoreWait, waits: WaitFacts | None) -> NotReadyError:
    return NotReadyError(wait.message, no_refill(waits, waited_s=wait.wait_s))
