"""Calls of several steps, written once for threads and for asyncio.

A generator yields what is sent to the store and receives the reply, or the error.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

import redis
import redis.asyncio

from turnstream.store.client import keys
from turnstream.store.client.scripts import Argument, Command, run_command, run_command_async
from turnstream.store.waits.bounded_call import StoreWait


class ReadWaits(NamedTuple):
    """A question for the facts that a wait on a run may depend on."""

    run: str


Words = tuple[Argument, ...]
Step = Command | ReadWaits | Words

_Result = TypeVar("_Result")
Steps = Generator[Step, Any, _Result]


def until_woken(run: str, wake_id: str, wait: StoreWait) -> Words:
    """Return the step that waits until the run's wake stream is beyond this id."""
    return ("XREAD", "BLOCK", wait.block_ms, "STREAMS", keys.run_keys(run).wake, wake_id)


def take_steps(client: redis.Redis, steps: Steps[_Result], wait: StoreWait) -> _Result:
    """Return the result of the steps; each must be answered before the wait ends."""
    try:
        step = next(steps)
        while True:
            try:
                reply = _reply(client, step, wait)
            except BaseException as error:  # noqa: BLE001 - the steps raise it again
                step = steps.throw(error)
            else:
                step = steps.send(reply)
    except StopIteration as end:
        return end.value


async def take_steps_async(
    client: redis.asyncio.Redis, steps: Steps[_Result], wait: StoreWait
) -> _Result:
    """Return the result of the steps, for asyncio."""
    try:
        step = next(steps)
        while True:
            try:
                reply = await _reply_async(client, step, wait)
            except BaseException as error:  # noqa: BLE001 - the steps raise it again
                step = steps.throw(error)
            else:
                step = steps.send(reply)
    except StopIteration as end:
        return end.value


def _reply(client: redis.Redis, step: Step, wait: StoreWait) -> Any:
    if isinstance(step, ReadWaits):
        return wait.read_waits(client, step.run)
    with wait.bounded():
        if isinstance(step, Command):
            return run_command(client, step)
        return client.execute_command(*step)


async def _reply_async(client: redis.asyncio.Redis, step: Step, wait: StoreWait) -> Any:
    if isinstance(step, ReadWaits):
        return await wait.read_waits_async(client, step.run)
    async with wait.bounded_async():
        if isinstance(step, Command):
            return await run_command_async(client, step)
        return await client.execute_command(*step)
