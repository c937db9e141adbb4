"""One command in a process group of its own, with its output in a bounded file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from turnstream.store.client.cancellation import to_the_end

MAX_OUTPUT_BYTES: Final = 16 << 20
_GRACE_S: Final = 5.0
"""Time between SIGTERM and SIGKILL."""

_DYING_S: Final = 0.2
"""Longest wait for the end after SIGKILL. The parent of a zombie may never reap it."""

_POLL_S: Final = 0.05
_DRAIN_S: Final = 1.0
"""Time for the rest of the output. A process outside of the group may hold the pipe open."""

_CHUNK: Final = 16 << 10


class Ended(NamedTuple):
    """How a command ended; `status` is 128 + N after the signal N, as shells report it."""

    status: int
    has_timed_out: bool = False


async def run_process(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: Path,
    errors: Path | None = None,
    timeout_s: float,
) -> Ended:
    """Run a command until its end or the time limit. No process of its group is left then.

    Args:
        command: program and arguments.
        environment: all of its variables.
        output: receives its output, at most `MAX_OUTPUT_BYTES`.
        errors: receives its standard error; None: `output` does.
        timeout_s: seconds after which the group gets SIGTERM, and SIGKILL 5 s later.
    """
    async with contextlib.AsyncExitStack() as pipes:
        stdout = await pipes.enter_async_context(_pipe_to(output))
        stderr = subprocess.STDOUT
        if errors is not None:
            stderr = await pipes.enter_async_context(_pipe_to(errors))
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=dict(environment),
                start_new_session=True,
            )
        finally:
            for each in {stdout, stderr} - {subprocess.STDOUT}:
                os.close(each)
        has_timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            has_timed_out = True
        finally:
            await to_the_end(_end_group(process))
    status = process.returncode or 0
    return Ended(status if status >= 0 else 128 - status, has_timed_out)


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End the process and everything in its group."""
    if process.returncode is None:
        _signal(process.pid, signal.SIGTERM)
        await _wait_for_end(process.pid, timeout_s=_GRACE_S)
    _signal(process.pid, signal.SIGKILL)
    await process.wait()
    await _wait_for_end(process.pid, timeout_s=_DYING_S)


async def _wait_for_end(group: int, *, timeout_s: float) -> None:
    """Wait until a process group is empty, or for `timeout_s`."""
    for _ in range(round(timeout_s / _POLL_S)):
        if not _signal(group, 0):
            return
        await asyncio.sleep(_POLL_S)


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group; return whether it has a process."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS: a group of zombies
        return False
    return True


@contextlib.asynccontextmanager
async def _pipe_to(path: Path) -> AsyncIterator[int]:
    """Yield the write end of a pipe, which the caller closes. Its bytes are written to a file."""
    reader = asyncio.StreamReader(limit=_CHUNK)
    read_end, write_end = os.pipe()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
    )
    copying = asyncio.create_task(_copy(reader, path))
    try:
        yield write_end
        await asyncio.wait([copying], timeout=_DRAIN_S)
    finally:
        transport.close()
        copying.cancel()
        await asyncio.wait([copying])


async def _copy(reader: asyncio.StreamReader, path: Path) -> None:
    """Write the output to a file, and drop what is above the limit."""
    left = MAX_OUTPUT_BYTES
    with path.open("wb", buffering=0) as file:
        while part := await reader.read(_CHUNK):
            if left >= 0:
                file.write(part[:left])
                left -= len(part)
                if left < 0:
                    file.write(b"\n[the output is cut here: it has more than 16 MiB]\n")
