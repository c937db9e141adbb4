"""A batcher on a real store, and groups of letters to train on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

from turnstream_server.batcher.serving.options import BatcherOptions
from turnstream_server.batcher.serving.service import serving
from turnstream_server.embedded import EmbeddedServer


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """A server for each test: a batcher meets every run that its store has."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def batcher(server: EmbeddedServer) -> Iterator[str]:
    """The address of a batcher that runs in a thread of its own, for the length of a test."""
    torch.set_num_threads(1)
    addresses: list[str] = []
    loop = asyncio.new_event_loop()
    may_end, is_up = asyncio.Event(), threading.Event()

    async def serve() -> None:
        async with serving(BatcherOptions(redis_url=server.url)) as address:
            addresses.append(address)
            is_up.set()
            await may_end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        assert is_up.wait(60)
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(may_end.set)
        thread.join(60)
    assert not thread.is_alive()
    loop.close()
