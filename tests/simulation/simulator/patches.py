"""Where the code under test reaches the outside, the inside of the running process's world instead.

Sockets, clocks, jitter, and how often time is looked at: nothing else is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from simulator.processes import Process, ProcessLoop
from simulator.store.clients import AsyncClient, AsyncLinkInMemory, LinkInMemory, thread_client
from turnstream.generator.api import publisher_core, work
from turnstream.generator.transport import sender, transport
from turnstream.store.client.trajectory_names import keys_named
from turnstream_server.batcher.assembly import payload
from turnstream_server.batcher.planner import planner, renewal, timekeeper

_LOOKS = 6
"""Per lease and per deadline: half of what they are, and enough to find the clock steady."""


def running_process() -> Process:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ProcessLoop)
    return loop.process


_LOSS = re.compile("and the store lost it|the store came back without")


class _Complaints(logging.Handler):
    """Turns each logged error into a problem of the world."""

    def emit(self, record: logging.LogRecord) -> None:
        loop = asyncio._get_running_loop()
        if not isinstance(loop, ProcessLoop):
            return  # the remains of a run that failed
        process = loop.process
        may_lose = process.world.counts.keys() & {"cut", "jump"}
        if _LOSS.search(record.getMessage()) and may_lose:
            text = record.getMessage().partition(": ")[2]
            name = text.partition(" ")[0].rstrip(":")
            is_trajectory = "/" in name
            process.world.lost(keys_named(name)[0].trajectory_id if is_trajectory else name, text)
            return
        has_slept = record.getMessage().startswith("the event loop hangs")
        if not process.is_dead and not has_slept:
            text = record.getMessage()
            if record.exc_info is not None:
                text += "\n" + logging.Formatter().formatException(record.exc_info)
            process.world.fail(f"{process.name} logs: {text}")


def _in_process(make: Callable[[Process], Any]) -> Callable[..., Any]:
    return lambda *_, **__: make(running_process())


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Within, whatever connects is connected to the world of the process that runs."""
    clock = SimpleNamespace(monotonic=lambda: running_process().world.now_s)
    chance = SimpleNamespace(random=lambda: running_process().world.rng.random())
    client, link = _in_process(AsyncClient), _in_process(AsyncLinkInMemory)
    log: dict[str, Any] = {"handlers": [_Complaints(logging.ERROR)], "propagate": False}
    with (
        patch.multiple(transport, AsyncLink=link, connect_async=client),
        patch.multiple(sender, time=clock),
        patch.multiple(publisher_core, time=clock, random=chance),
        patch.multiple(work, random=chance),
        patch.multiple(planner, connect_async=client),
        patch.multiple(renewal, connect=_in_process(thread_client), time=clock),
        patch.multiple(payload, Link=_in_process(LinkInMemory)),
        patch.multiple(timekeeper, READS_PER_LEASE=_LOOKS, CHECKS_PER_DEADLINE=_LOOKS),
        patch.multiple(logging.getLogger("turnstream"), **log),
        patch.multiple(logging.getLogger("turnstream_server"), **log),
    ):
        yield
