"""The wait for newer weights."""

from __future__ import annotations

from typing import Any

import redis

from turnstream.errors import NotReadyError
from turnstream.store.client import keys
from turnstream.store.client.connection import address_of_client
from turnstream.store.client.run_ids import find_run
from turnstream.store.run.runs import newest_version
from turnstream.store.waits.awaited import no_version
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.types import VersionAnnounced


def wait_for_version(
    client: redis.Redis, run: str, *, above: int, timeout_s: float
) -> VersionAnnounced:
    """Return the newest version, once it is higher than `above`."""
    what = f"run {run!r}: no version above {above}"
    wait = StoreWait(address_of_client(client), "version", what, wait_s=timeout_s)
    with wait.bounded(client) as limited:
        run = find_run(limited, run)
    # The entry of version v has the id <v + 1>-0: newer versions have later ids.
    position: Any = {keys.run_keys(run).versions: f"{above + 1}-0"}
    while True:
        with wait.bounded(client) as limited:
            found = limited.xread(position, count=1, block=wait.block_ms)
            newest = newest_version(limited, run) if found else None
        if newest is not None:
            return newest
        wait.note_answer(f"no version above {above} was announced")
        if wait.has_timed_out:
            reasons = no_version(above, wait.read_waits(client, run), waited_s=timeout_s)
            raise NotReadyError(wait.message, reasons)
