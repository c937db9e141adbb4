"""The store of a process: the embedded server, or an external one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from turnstream.store.client.addresses import URL_VARIABLE
from turnstream.store.client.connection import connect
from turnstream.store.client.replies import translating
from turnstream.store.client.server_checks import SYNCS_OF
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.settings import Settings, checked_store_url

_ANSWER_S: Final = 5.0
"""A server that has not answered for so long is away."""


@contextlib.contextmanager
def open_store(settings: Settings, *, port: int = 0) -> Iterator[str]:
    """Return the URL of the store, which is available until the end of the block.

    Without TURNSTREAM_REDIS_URL the embedded server runs until then; an external server is checked,
    and never stopped.

    Args:
        settings: choice of the server, and the folder of the embedded one.
        port: port of the embedded server; 0 takes a free one.

    Raises:
        InvalidConfigError: the address is none of a store, or the external server is too old, or
            its settings would lose data.
        StoreUnavailableError: it cannot be reached, or the embedded one does not start.
    """
    if settings.redis_url is not None:
        url = checked_store_url(settings.redis_url.get_secret_value(), field=URL_VARIABLE)
        url = settings.with_password(url)
        check_store(url, durability=settings.durability)
        yield url
        return
    with EmbeddedServer(
        settings.data_dir,
        durability=settings.durability,
        max_memory_bytes=settings.store_max_bytes,
        port=port,
    ) as server:
        yield server.url


def check_store(url: str, *, durability: str) -> None:
    """Make sure that a server keeps what it acknowledges.

    Raises:
        InvalidConfigError: the address is none of a store.
        UnsafeStoreError: names the server's setting, its value and the one that is needed.
        StoreUnavailableError: the server cannot be reached.
    """
    url = checked_store_url(url, field=URL_VARIABLE)
    syncs = SYNCS_OF[durability]
    client = connect(url, num_retries=0, silent_s=_ANSWER_S, syncs=syncs)
    with client, translating():
        client.ping()
