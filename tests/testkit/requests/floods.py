"""Requests of one tenant, from many connections at once, as fast as the answers come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

Request = Callable[[int, int], bytes]
"""Returns the bytes of a request, from the number of its connection and of the request."""


def http_request(method: str, path: str, *, key: str = "", content: Any = None) -> bytes:
    """Return the bytes of a request; one without a key has no header for it."""
    body = b"" if content is None else json.dumps(content).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
    lines += ["Content-Type: application/json"] if body else []
    lines += [f"X-API-Key: {key}"] if key else []
    return "\r\n".join([*lines, "", ""]).encode() + body


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes
) -> tuple[int, bytes]:
    """Return the status and the body of the answer to a request on an open connection."""
    writer.write(sent)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, _, after = head.partition(b"content-length: ")
    return int(head[9:12]), await reader.readexactly(int(after.partition(b"\r\n")[0]))


@contextlib.contextmanager
def flooding(address: str, request: Request, *, num_connections: int) -> Iterator[dict[int, int]]:
    """Send requests in the block; yield the number of answers by status, which grows."""
    statuses: dict[int, int] = {}
    has_ended = threading.Event()

    async def send(connection: int) -> None:
        reader, writer = await asyncio.open_connection(*address.split(":"), limit=1 << 24)
        with contextlib.closing(writer):
            number = 0
            while not has_ended.is_set():
                status, _ = await exchange(reader, writer, request(connection, number))
                statuses[status] = statuses.get(status, 0) + 1
                number += 1

    async def send_all() -> None:
        await asyncio.gather(*map(send, range(num_connections)))

    thread = threading.Thread(target=lambda: asyncio.run(send_all()), daemon=True)
    thread.start()
    try:
        yield statuses
    finally:
        has_ended.set()
        thread.join(60)
        assert not thread.is_alive()
