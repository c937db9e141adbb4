"""Answers of all calls: limits of time, statuses of errors, and reasons of waits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

import grpc
import grpc.aio
import redis.asyncio

from turnstream.errors import InvalidConfigError, StoreUnavailableError, TurnstreamError, WaitReason
from turnstream.records.statuses import error_to_status
from turnstream.store.client.cancellation import cancel_all
from turnstream.store.client.connection import address_of_client, connect
from turnstream.store.waits.awaited import store_away
from turnstream.store.waits.bounded_call import unanswered
from turnstream.store.waits.wait_reasons import reasons
from turnstream_server.ledger.queries.run_snapshot import read_snapshot
from turnstream_server.telemetry.instruments import count_error, counter, histogram
from turnstream_server.telemetry.tracing import span

logger = logging.getLogger(__name__)

_CALLS = counter("turnstream_batcher_calls", "Calls of gRPC that have ended.", ["call", "code"])
_CALL_SECONDS = histogram(
    "turnstream_batcher_call_seconds", "Duration of a call of gRPC.", ["call"]
)

Context = grpc.aio.ServicerContext[Any, Any]

_ANSWER_SHARE: Final = 0.2
"""Share of a caller's deadline that is kept for the answer that the store is silent."""

MAX_REASONS: Final = 4
"""A header of the answer carries them, and its size is limited."""

_READ_EVERY_S: Final = 5.0
"""Many ranks wait for the same, and a read scans the ledger."""

_READ_TIMEOUT_S: Final = 0.8
"""Longest wait for a read, well within the time that a Get has for its answer."""

_LEAST_ANSWER_S: Final = 1.0
"""Time for a Get that has waited to read the reason from the store."""


RETRY_AFTER: Final = "retry-after"
"""Trailing metadata of an error: seconds until the same call may succeed."""


def store_time_s(left_s: float | None) -> float | None:
    """Return the seconds that the store has for its answer, of those that a caller has left."""
    return None if left_s is None else left_s * (1 - _ANSWER_SHARE)


def get_time_s(wait_s: float) -> float:
    """Return the longest time until a Get that waits for `wait_s` has its batch or an error."""
    return wait_s + max(_LEAST_ANSWER_S, wait_s * _ANSWER_SHARE)


class RunningCalls:
    """The calls in progress."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @contextlib.asynccontextmanager
    async def answering(self, context: Context, *, call: str) -> AsyncIterator[None]:
        """Abort the call with the status of the error that the block raises."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        name, status, began_s = call.removesuffix("Request"), "CANCELLED", time.monotonic()
        try:
            with span(f"grpc {name}", traceparent=headers_of(context).get("traceparent", "")):
                yield
            status = "OK"
        except TurnstreamError as error:
            count_error(type(error), service="batcher")
            status, details = error_to_status(error)
            if isinstance(error, InvalidConfigError):
                logger.info("%s of %s is refused: %s", call, context.peer(), error)
            await context.abort(grpc.StatusCode[status], details, _retry_after(error))
        except Exception:
            status = "INTERNAL"
            logger.exception("%s failed", call)
            await context.abort(grpc.StatusCode.INTERNAL, "the batcher failed; its log says how")
        finally:
            self._tasks.discard(task)
            _CALLS.labels(name, status).inc()
            _CALL_SECONDS.labels(name).observe(time.monotonic() - began_s)

    async def close(self) -> None:
        """Cancel the calls that the stopped server has not cancelled yet: they use the store."""
        await cancel_all([*self._tasks])


def _retry_after(error: TurnstreamError) -> tuple[tuple[str, str], ...]:
    """Return trailing metadata with whole seconds, as the header Retry-After of HTTP has them."""
    wait_s = getattr(error, "retry_after_s", None)
    return () if wait_s is None else ((RETRY_AFTER, str(max(1, math.ceil(wait_s)))),)


def headers_of(context: Context) -> dict[str, str]:
    """Return the texts in the metadata of a call."""
    metadata = context.invocation_metadata() or ()
    return {name: value for name, value in metadata if isinstance(value, str)}


async def write_messages(
    messages: AsyncGenerator[bytes], context: Context, *, end_of_caller: str
) -> None:
    """Send messages until the caller ends the call, which is logged as `end_of_caller`."""
    async with contextlib.aclosing(messages):
        async for message in messages:
            try:
                await context.write(message)
            except (grpc.aio.InternalError, asyncio.CancelledError) as error:
                logger.info("%s before its last byte", end_of_caller)
                if isinstance(error, asyncio.CancelledError):
                    raise
                return


@contextlib.asynccontextmanager
async def bounded_by_store(
    client: redis.asyncio.Redis, within_s: float | None
) -> AsyncIterator[None]:
    """Limit the waits for a silent store inside the block; then raise a StoreUnavailableError."""
    address, began_s = address_of_client(client), time.monotonic()
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError as error:
        silent = store_away(address=address, since_s=time.monotonic() - began_s)
        raise StoreUnavailableError(silent.sentence, [silent]) from error
    except StoreUnavailableError as error:
        since_s = time.monotonic() - began_s
        why = error.reasons or [unanswered(error, address=address, since_s=since_s)]
        raise StoreUnavailableError(error.message, why, error.retry_after_s) from error


class ReasonCache:
    """Reads the reasons why the runs of a store wait."""

    def __init__(self, url: str) -> None:
        self._client = connect(url)
        self._reads: dict[str, asyncio.Task[list[WaitReason]]] = {}

    async def reasons(self, run: str) -> list[WaitReason]:
        """Return the reasons why a run waits, the most important first, a few seconds old at most.

        They accompany an error, and must not replace it: nothing is returned if they cannot be
        read, or not in time.
        """
        read = self._reads.get(run)
        if read is None:
            read = self._reads[run] = asyncio.create_task(self._read(run))
            asyncio.get_running_loop().call_later(_READ_EVERY_S, self._reads.pop, run)
        await asyncio.wait([read], timeout=_READ_TIMEOUT_S)
        return read.result() if read.done() else []

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    async def _read(self, run: str) -> list[WaitReason]:
        try:
            snapshot = await asyncio.to_thread(read_snapshot, self._client, run)
        except TurnstreamError:
            return []
        except Exception:
            logger.exception("the reasons why run %s waits could not be read", run)
            return []
        return reasons(snapshot)[:MAX_REASONS]
