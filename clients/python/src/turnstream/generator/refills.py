"""Taking refills: attempts that stand in for those that ended or hang, begun by whoever is free."""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Iterator, Sequence

import redis
import redis.asyncio

from turnstream.errors import NotReadyError
from turnstream.store import keys
from turnstream.store.connection import MAX_BLOCK_S
from turnstream.store.groups import (
    Refill,
    list_refills_command,
    open_refill_command,
    parse_refills,
)
from turnstream.store.replies import translating
from turnstream.store.scripts import run_command, run_command_async
from turnstream.store.wait_reasons import no_refill
from turnstream.store.waits import WaitFacts, read_waits, read_waits_async
from turnstream.types import TrajectoryKey

_MAX_LISTED = 32


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
        StoreUnavailableError: the store cannot be reached.
    """
    deadline_s = time.monotonic() + timeout_s
    tried = {} if tried is None else tried
    while True:
        listing = run_command(client, list_refills_command(run, max_count=_MAX_LISTED))
        wake_id, refills = parse_refills(listing)
        untried = _in_turn([each for each in refills if each.key not in tried], writer)
        for refill in untried:
            with _trying(refill.key, tried) as is_ours:
                command = open_refill_command(run, writer, refill)
                if is_ours and _is_taken(run_command(client, command)):
                    return refill
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise _none_came(run, timeout_s, read_waits(client, run))
        if not untried:
            with translating():
                client.xread({keys.run_keys(run).wake: wake_id}, block=_block_ms(left_s))


async def take_refill_async(
    client: redis.asyncio.Redis,
    run: str,
    *,
    writer: str,
    timeout_s: float,
    tried: dict[TrajectoryKey, object] | None = None,
) -> Refill:
    """The same as `take_refill`, for asyncio."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    tried = {} if tried is None else tried
    while True:
        listing = await run_command_async(client, list_refills_command(run, max_count=_MAX_LISTED))
        wake_id, refills = parse_refills(listing)
        untried = _in_turn([each for each in refills if each.key not in tried], writer)
        for refill in untried:
            with _trying(refill.key, tried) as is_ours:
                command = open_refill_command(run, writer, refill)
                if is_ours and _is_taken(await run_command_async(client, command)):
                    return refill
        left_s = deadline_s - loop.time()
        if left_s <= 0:
            raise _none_came(run, timeout_s, await read_waits_async(client, run))
        if not untried:
            with translating():
                await client.xread({keys.run_keys(run).wake: wake_id}, block=_block_ms(left_s))


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


def _block_ms(left_s: float) -> int:
    return max(1, int(min(MAX_BLOCK_S, left_s) * 1000))


def _none_came(run: str, timeout_s: float, waits: WaitFacts | None) -> NotReadyError:
    message = f"run {run!r}: no sample was to be tried again within {timeout_s:g} s"
    return NotReadyError(message, no_refill(waits, waited_s=timeout_s))
