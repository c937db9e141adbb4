"""Waiting for something to become true, with a failure that says what it was."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from turnstream.errors import UnavailableError, WaitKind

Value = TypeVar("Value")

POLL_INTERVAL_S = 0.01

TIMEOUT_S = 30.0
"""A condition usually becomes true within milliseconds. A busy machine, or one that pauses, must
not fail a test."""


def wait_until(
    predicate: Callable[[], Value], timeout_s: float = TIMEOUT_S, describe: str = "the condition"
) -> Value:
    """Ask about every 10 ms until the answer is true, and give that answer.

    Raises:
        TimeoutError: names what was waited for, and the last answer.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(_gave_up(describe, timeout_s, answer))
        time.sleep(POLL_INTERVAL_S)


async def wait_until_async(
    predicate: Callable[[], Awaitable[Value] | Value],
    timeout_s: float = TIMEOUT_S,
    describe: str = "the condition",
) -> Value:
    """`wait_until` that lets the event loop run; the predicate may be asynchronous."""
    deadline = time.monotonic() + timeout_s
    while True:
        found: Any = predicate()
        answer: Value = await found if inspect.isawaitable(found) else found
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(_gave_up(describe, timeout_s, answer))
        await asyncio.sleep(POLL_INTERVAL_S)


def _gave_up(describe: str, timeout_s: float, answer: object) -> str:
    return f"timed out after {timeout_s:g} s waiting for {describe}; the last answer was {answer!r}"


async def finish(call: Callable[[], Any]) -> Any:
    """Return the result of a call of either publisher; a blocking call runs in a thread."""
    answer = await asyncio.to_thread(call)
    return await answer if inspect.iscoroutine(answer) else answer


@contextlib.asynccontextmanager
async def entered(context: Any) -> AsyncIterator[Any]:
    """Enter a publisher, or a writer, of either kind."""
    if hasattr(context, "__aenter__"):
        async with context as target:
            yield target
    else:
        with context as target:
            yield target


def entry(context: Any) -> Callable[[], Any]:
    """Return the method that enters a writer of either kind."""
    return getattr(context, "__aenter__", None) or context.__enter__


def kinds(error: UnavailableError) -> list[str]:
    """Return the reasons of an error, for programs."""
    return [reason.kind for reason in error.reasons]


def facts(error: UnavailableError, kind: WaitKind) -> dict[str, Any]:
    """Return the facts of the first reason of a kind."""
    return next(
        each for each, its in zip(all_facts(error), kinds(error), strict=True) if its == kind
    )


def all_facts(error: UnavailableError) -> list[dict[str, Any]]:
    """Return the facts of each reason."""
    return [dict(reason.facts) for reason in error.reasons]
