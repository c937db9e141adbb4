"""The publishers of a gateway process, one per run and writer, and its open trajectories.

A trajectory that is in no cache is adopted from the store under the same writer name, which needs
no wait. So a gateway may be restarted, or another replica may get the next turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Final

import redis.asyncio

from turnstream.errors import RejectedError, TurnstreamError
from turnstream.store.client.cancellation import cancel_all
from turnstream.store.client.run_ids import find_run_async
from turnstream.store.run.configs import read_config_async
from turnstream.types.names import RunId
from turnstream_server.gateway.rest.ingest.places import Places, RunWriter, Slot
from turnstream_server.gateway.rest.ingest.writers import IngestPublisher

MAX_PUBLISHERS: Final = 512
"""Writers of one owner of keys. Each has a connection to the store."""

_SWEEPS_PER_LEASE: Final = 4
_LONGEST_PAUSE_S: Final = 5.0
_CLOSE_S: Final = 2.0
_FRESH_S: Final = 1.0

logger = logging.getLogger(__name__)


class Publishers:
    """All publishers of one gateway process.

    Args:
        url: address of the store.
        client: client of the store.
    """

    def __init__(self, url: str, client: redis.asyncio.Redis) -> None:
        self._url = url
        self._client = client
        self._places: dict[str, Places] = {}
        self._run_ids: dict[str, tuple[float, RunId]] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def lend(
        self, run: str, writer: str, *, owner: str, is_shared: bool
    ) -> AsyncIterator[RunWriter]:
        """Yield the writer of a name in the run that has this name now.

        Args:
            run: name of the run.
            writer: name of the writer.
            owner: owner of the key: its writers are its own, as those of another process.
            is_shared: see `RunWriter`.

        Raises:
            RunNotFoundError: no such run.
            RejectedError: too many writers are active.
            StoreUnavailableError: the store cannot be reached.
        """
        lent = await self._found(run, writer, owner=owner, is_shared=is_shared)
        lent.num_active += 1
        lent.used_s = _now_s()
        try:
            yield lent
        finally:
            lent.num_active -= 1
            lent.used_s = _now_s()

    def keep(self, lent: RunWriter, slots: Iterable[Slot], *, owner: str) -> None:
        """Keep the open trajectories of a request; see `Places.keep`."""
        self._of(owner).keep(lent, slots, now_s=_now_s())

    async def close(self) -> None:
        """Send accepted writes, and close all publishers; trajectories stay open in the store."""
        self._is_closed = True
        if self._sweeping is not None:
            await cancel_all([self._sweeping])
        closing, self._places = self._places, {}
        for places in closing.values():
            for each in list(places.writers.values()):
                await _close(places, each)

    def _of(self, owner: str) -> Places:
        return self._places.setdefault(owner, Places())

    async def _found(self, run: str, writer: str, *, owner: str, is_shared: bool) -> RunWriter:
        run_id = await self._id_of(run)
        name = (run_id, writer)
        if (found := self._of(owner).writers.get(name)) is not None:
            return found
        _, config = await read_config_async(self._client, run_id)
        if len(self._of(owner).writers) >= MAX_PUBLISHERS:
            await _close_oldest(self._of(owner))
        places = self._of(owner)
        found = places.writers.get(name)
        if found is None:
            publisher = IngestPublisher(self._url, run_id, writer=writer)
            found = RunWriter(publisher, lease_s=config.lease_s, is_shared=is_shared)
            places.writers[name] = found
        if self._sweeping is None and not self._is_closed:
            self._sweeping = asyncio.create_task(self._sweep(), name="silent-writers")
        return found

    async def _id_of(self, run: str) -> RunId:
        """Return the id of the run that has this name, or had it a second ago."""
        found_s, run_id = self._run_ids.get(run, (-_FRESH_S, None))
        if run_id is None or _now_s() - found_s >= _FRESH_S:
            run_id = await find_run_async(self._client, run)
            if len(self._run_ids) >= MAX_PUBLISHERS:
                self._run_ids.clear()
            self._run_ids[run] = (_now_s(), run_id)
        return run_id

    async def _sweep(self) -> None:
        """Drop the trajectories of silent clients, again and again."""
        while True:
            every = [each for places in self._places.values() for each in places.writers.values()]
            shortest_s = min([each.lease_s for each in every], default=60.0)
            await asyncio.sleep(min(_LONGEST_PAUSE_S, shortest_s / _SWEEPS_PER_LEASE))
            try:
                for owner, places in list(self._places.items()):
                    await _drop_silent(places, _now_s())
                    if not places.writers:
                        self._places.pop(owner, None)
            except Exception:
                logger.exception("silent writers are not dropped")


async def _drop_silent(places: Places, now_s: float) -> None:
    for name, each in list(places.writers.items()):
        if each.num_active:
            continue
        if now_s - each.used_s > each.lease_s:
            del places.writers[name]
            await _close(places, each)
        elif each.is_shared:
            places.drop(each, each.silent(now_s=now_s))


async def _close_oldest(places: Places) -> None:
    idle = [(each.used_s, name) for name, each in places.writers.items() if not each.num_active]
    if not idle:
        text = f"all {MAX_PUBLISHERS} writers that a key may have in the gateway are active"
        raise RejectedError(text, 1.0)
    await _close(places, places.writers.pop(min(idle)[1]))


async def _close(places: Places, closing: RunWriter) -> None:
    places.forget(closing)
    try:
        await closing.publisher.close(_CLOSE_S)
    except TurnstreamError as error:
        logger.warning("run %s: %s", closing.publisher.run, error)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
