"""A process that parses bodies for its parent, over its standard input and output."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from typing import Any, BinaryIO, Final

from turnstream.errors import UnavailableError
from turnstream_server.free_memory import return_free_memory

_LENGTHS: Final = struct.Struct("<QQ")
_LENGTH: Final = struct.Struct("<Q")
_BUFFER_BYTES: Final = 1 << 20
LONGEST_S: Final = 60.0
"""Time for one call. The largest body takes about 2 s of a core."""


class ParseProcess:
    """A process that runs one call at a time. It ends with its parent."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout

    @classmethod
    async def start(cls) -> ParseProcess:
        """Start a process."""
        words = [sys.executable, "-m", __name__]
        return cls(
            await asyncio.create_subprocess_exec(
                *words, stdin=PIPE, stdout=PIPE, limit=_BUFFER_BYTES
            )
        )

    async def answer(self, parse: Callable[[bytes], Any], body: bytes) -> bytes:
        """Return the pickled answer of a parser: whether it has raised, and its error or result.

        Raises:
            UnavailableError: the process has ended, or takes too long.
        """
        try:
            async with asyncio.timeout(LONGEST_S):
                packed = pickle.dumps(parse)
                self._stdin.write(_LENGTHS.pack(len(packed), len(body)) + packed)
                for start in range(0, len(body), _BUFFER_BYTES):
                    self._stdin.write(body[start : start + _BUFFER_BYTES])
                    await self._stdin.drain()
                (length,) = _LENGTH.unpack(await self._stdout.readexactly(_LENGTH.size))
                return await self._stdout.readexactly(length)
        except TimeoutError as error:
            text = f"the body was not parsed within {LONGEST_S:g} s"
            raise UnavailableError(text) from error
        except (OSError, asyncio.IncompleteReadError) as error:
            raise UnavailableError("the process that parses the body has ended") from error

    async def end(self) -> None:
        """End the process at once."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._stdin.close()
        await self._process.wait()


def run_parsers(calls: BufferedReader, answers: BinaryIO) -> None:
    """Answer calls until the parent closes its end."""
    while header := calls.read(_LENGTHS.size):
        length, num_bytes = _LENGTHS.unpack(header)
        packed, body = calls.read(length), bytearray(num_bytes)
        calls.readinto(body)
        answer = pickle.dumps(_answer(packed, body), protocol=5)
        del body
        answers.write(_LENGTH.pack(len(answer)))
        answers.write(answer)
        answers.flush()
        del answer
        return_free_memory()


def _answer(packed: bytes, body: bytearray) -> tuple[bool, Any]:
    try:
        return False, pickle.loads(packed)(body)  # noqa: S301 - of the parent
    except Exception as error:  # noqa: BLE001 - the parent raises it
        return True, error


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a print of a library is no answer
    run_parsers(os.fdopen(0, "rb"), answers)


if __name__ == "__main__":
    _main()
