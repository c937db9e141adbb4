"""The answer of a model call: it grows as the engine samples, and each request follows it whole.

An answer outlives the connection of its agent, so that a retry follows the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.types import Receive, Send

from turnstream.store.client.cancellation import cancel_all

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"

_NO_HEADERS: Mapping[str, str] = {}


def json_bytes(content: Any) -> bytes:
    """Return JSON as the body of an answer."""
    return json.dumps(content, separators=(",", ":")).encode()


class Answer:
    """Status, media type and body of an answer. Requests that follow it get it from its start.

    Attributes:
        status: 0 until the answer begins.
        num_bytes: bytes of the body so far.
        num_followers: requests that follow it now.
        was_taken: a request got all of it.
    """

    def __init__(self) -> None:
        self.status = 0
        self.num_bytes = 0
        self.num_followers = 0
        self.was_taken = False
        self.is_whole = False
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._changed = asyncio.Event()

    def begin(self, status: int, media_type: str, headers: Mapping[str, str] = _NO_HEADERS) -> None:
        """Set the head of the answer."""
        self.status = status
        self._headers = {"content-type": media_type, **headers}
        self._notify()

    def add(self, part: bytes) -> None:
        """Add a part of the body."""
        self._parts.append(part)
        self.num_bytes += len(part)
        self._notify()

    def end(self) -> None:
        """End the answer: no part follows. An answer without a head has failed, with status 500."""
        if not self.status:
            self.begin(500, JSON)
        self.is_whole = True
        self._notify()

    async def wait_for_follower(self, *, timeout_s: float) -> bool:
        """Return whether a request follows it, at the latest after this time."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while not self.num_followers and (left_s := until_s - loop.time()) > 0:
            await self._change(left_s)
        return self.num_followers > 0

    async def send_to(self, receive: Receive, send: Send) -> None:
        """Send the answer as the response of a request, until its client disconnects."""
        self.num_followers += 1
        self._notify()
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                self.was_taken = True
        finally:
            self.num_followers -= 1
            await cancel_all((sending, leaving))

    async def _send(self, send: Send) -> None:
        while not self.status:
            await self._change()
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        num_sent = 0
        while True:
            is_whole, parts = self.is_whole, self._parts[num_sent:]
            num_sent += len(parts)
            body = b"".join(parts)
            await send({"type": "http.response.body", "body": body, "more_body": not is_whole})
            if is_whole:
                return
            if num_sent == len(self._parts) and not self.is_whole:
                await self._change()

    async def _change(self, timeout_s: float | None = None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _disconnected(receive: Receive) -> None:
    """Return once the client of a request has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
