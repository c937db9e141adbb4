"""The ranks of a simulated session: each asks for the batches by itself."""

from __future__ import annotations

import contextlib

from simulator.clients import AsyncClient
from simulator.shared_state import URL, SharedState
from turnstream.errors import CorruptRecordError, NotReadyError
from turnstream.types import RecoveryToken
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.serving.request_checks import admit
from turnstream_server.bus.planning.replans import note_damage
from turnstream_server.bus.sessions.sessions import (
    TrainerSession,
    acknowledge_committed,
    acknowledge_stepped,
)


class Ranks:
    """All ranks of a session; each of them acknowledges.

    Args:
        client: client of the store.
        shared: state of the run.
        name: name of the session.
        begun: the session.
        dp_world_size: number of ranks.
    """

    def __init__(
        self,
        client: AsyncClient,
        shared: SharedState,
        name: str,
        begun: TrainerSession,
        *,
        dp_world_size: int,
    ) -> None:
        self._client = client
        self._shared = shared
        self._assembler = Assembler(URL, max_cache_bytes=1)
        self._step = begun.next_step - 1
        self._batch: PlannedBatch | None = None
        self._asked = [
            wire.GetRequest(
                run=shared.run,
                step=begun.next_step,
                session=name,
                session_epoch=begun.session_epoch,
                dp_rank=rank,
                dp_world_size=dp_world_size,
            )
            for rank in range(dp_world_size)
        ]

    @property
    def manifests(self) -> set[str]:
        """From which the batch was delivered that was pulled last."""
        return {asked.previous_hash for asked in self._asked}

    async def pull(self, view: RunView) -> PlannedBatch:
        """The next batch of rank 0, once every rank has one; called again where it failed."""
        for asked in self._asked:
            if asked.step == self._step + 1:
                batch = await self._get(view, asked)
                asked.step, asked.previous_hash = asked.step + 1, batch.manifest_hash
                self._batch = batch if asked.dp_rank == 0 else self._batch
        assert self._batch is not None
        self._step += 1
        return self._batch

    async def stepped(self, step: int, manifest_hash: str) -> RecoveryToken:
        """Acknowledge a step on every rank, each with the manifest of its own batch."""
        *others, last = self._asked
        for asked in others:
            with contextlib.suppress(NotReadyError):  # the last rank has not called yet
                await self._acknowledge(asked, step, manifest_hash)
        return await self._acknowledge(last, step, manifest_hash)

    async def _acknowledge(
        self, asked: wire.GetRequest, step: int, manifest_hash: str
    ) -> RecoveryToken:
        return await acknowledge_stepped(
            self._client,
            asked.run,
            session_epoch=asked.session_epoch,
            step=step,
            manifest_hash=asked.previous_hash if step == self._step else manifest_hash,
            session=asked.session,
            dp_rank=asked.dp_rank,
        )

    async def committed(self, token: RecoveryToken) -> None:
        """Acknowledge a checkpoint on every rank."""
        for asked in self._asked:
            await acknowledge_committed(
                self._client,
                asked.run,
                session_epoch=asked.session_epoch,
                token=token,
                session=asked.session,
                dp_rank=asked.dp_rank,
            )

    async def _get(self, view: RunView, asked: wire.GetRequest) -> PlannedBatch:
        """Do the work of the servicer before it sends a batch."""
        batch = await admit(self._client, view, asked, wait_s=0.0)
        if self._shared.rotten:
            await self._check_payload(batch)
        return batch

    async def _check_payload(self, batch: PlannedBatch) -> None:
        """Refuse damaged payload, as a replica does that assembles it for the first time."""
        damages = await self._assembler.examine(batch)
        if damages:
            step, sentence = batch.manifest.step, f"damaged payload of {damages[0].key}"
            await note_damage(
                self._client,
                self._shared.run,
                step=step,
                manifest_hash=batch.manifest_hash,
                sentence=sentence,
            )
            raise CorruptRecordError(sentence)
