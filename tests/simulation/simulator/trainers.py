"""Trainers: sessions that take batches as the servicer gives them, and acknowledge them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from simulator.processes import Process
from simulator.shared_state import URL, SharedState, patiently
from simulator.store.clients import AsyncClient
from turnstream.batching.merge.plan import Manifest
from turnstream.errors import (
    ConflictError,
    CorruptRecordError,
    EndOfRunError,
    FencedError,
    NotReadyError,
    ReleasedError,
    StoreBehindError,
    UnavailableError,
)
from turnstream.store.client import keys
from turnstream.types import RecoveryToken, VersionAnnounced
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.listener import RunListener
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.serving.get import admit
from turnstream_server.ledger.core.frontier import read_frontier_async
from turnstream_server.ledger.sessions.session_writes import TrainerRank, TrainerSession
from turnstream_server.ledger.sessions.sessions import (
    acknowledge_committed,
    acknowledge_stepped,
    announce_version,
    note_damage,
    start_session,
)

_LONGEST_WAIT_S = 1.0
_HANGS = 0.15
_SHORTEST_HANG_S, _LONGEST_HANG_S = 0.55, 1.2
"""How often a session hangs before a call, and for how long: another one usually starts then."""
_LONGEST_SAVE_S = 0.5
"""Longest time to save a checkpoint."""
_FROM_THE_START = RecoveryToken(lineage="main", step=0, chain_hash="")


async def trainer(process: Process, shared: SharedState) -> None:
    """One start of a trainer: from a checkpoint to the end of the run, or until it is replaced."""
    world, history = process.world, shared.history
    history.num_sessions += 1
    session = Session(process, shared, f"{process.name}-{history.num_sessions}")
    try:
        if await session.start():
            await session.train_all()
    except EndOfRunError:
        shared.is_ended = shared.frontier(process.world).get(b"finished") == b"1"  # unless reopened
    except FencedError as error:
        history.refused(error)
    except (StoreBehindError, ConflictError) as error:
        if not session.is_started or "cut" not in world.counts:
            raise
        history.refused(error)


class Session:
    """A session of one process, with all of its ranks.

    It repeats acknowledgements that a store has lost, as `turnstream.worker._acknowledged` does.
    """

    def __init__(self, process: Process, shared: SharedState, name: str) -> None:
        self._process, self._world, self._rng = process, process.world, process.world.rng
        self._shared, self._run, self._history = shared, shared.run, shared.history
        self._name = name
        self._client = AsyncClient(process)
        self._assembler = Assembler(URL, max_cache_bytes=1)
        self._acknowledged: list[tuple[int, str]] = []
        self._announced: VersionAnnounced | None = None
        self._requests: list[wire.GetRequest] = []
        self._batch: PlannedBatch | None = None
        self._step, self._session_epoch, self._lineage = 0, 0, ""

    @property
    def is_started(self) -> bool:
        """Return whether the store has started it."""
        return bool(self._requests)

    @property
    def is_newest(self) -> bool:
        """Return whether no other session has started."""
        return self._history.session == self._name

    async def start(self) -> bool:
        """Start from a checkpoint; return whether the session is still the newest."""
        history, rng = self._history, self._rng
        tokens: list[RecoveryToken | None] = [None, *history.checkpoints]
        token = tokens[-1]
        if rng.random() < 0.2:
            token = rng.choice(tokens[-self._shared.in_force.retain_checkpoints - 1 :])
        dp_world_size = rng.choice((2, 3, 4))
        # Try the newest checkpoints on disk first: a session that sleeps may have started after one
        # that is invalid here.
        others = [tokens[-1], *reversed(history.on_disk), None, _FROM_THE_START]
        while True:
            try:
                session = await start_session(
                    self._client,
                    self._run,
                    session=self._name,
                    dp_world_size=dp_world_size,
                    token=token,
                )
            except UnavailableError:
                await asyncio.sleep(0.1)
            except (ReleasedError, ConflictError, StoreBehindError) as error:
                history.refused(error)
                if not others:
                    raise
                token = others.pop(0)
            else:
                return self._continue_from(session, token, dp_world_size=dp_world_size)

    def _continue_from(
        self, session: TrainerSession, token: RecoveryToken | None, *, dp_world_size: int
    ) -> bool:
        history, next_step = self._history, session.next_step
        frontier = self._shared.frontier(self._world)
        if frontier[b"session"] != self._name.encode():
            return False  # it slept, and another started after it
        if int(frontier[b"stepped"]) != next_step - 1:
            self._world.fail(f"{self._name} starts with step {next_step}: {frontier}")
        self._shared.is_ended = False
        history.started(self._name, session, token, released=int(frontier.get(b"released", 0)))
        history.may_release(retained=self._shared.in_force.retain_checkpoints)
        self._step, self._session_epoch = next_step - 1, session.session_epoch
        self._lineage = session.lineage
        self._requests = [
            wire.GetRequest(
                run=self._run,
                step=next_step,
                session=self._name,
                session_epoch=session.session_epoch,
                dp_rank=rank,
                dp_world_size=dp_world_size,
            )
            for rank in range(dp_world_size)
        ]
        return True

    async def train_all(self) -> None:
        """Train until the run ends, or an error ends the session."""
        frontier = await patiently(lambda: read_frontier_async(self._client, self._run))
        view = RunView(self._client, self._run, frontier=frontier, on_stepped=lambda _: None)
        listener = RunListener(self._client, self._run, after_step=frontier.planned)
        while True:
            try:
                batch = await self._pull(view)
            except NotReadyError:
                await self._resend()  # the store may wait for a step that it has lost
                try:
                    await listener.wait(with_events=False, wait_s=_LONGEST_WAIT_S)
                except UnavailableError:
                    await asyncio.sleep(_LONGEST_WAIT_S / 2)
            except (UnavailableError, CorruptRecordError):
                await asyncio.sleep(0.1 + 0.4 * self._rng.random())
            else:
                await self._train(batch)

    async def _pull(self, view: RunView) -> PlannedBatch:
        """The next batch of rank 0, once every rank has one; called again after an error."""
        for request in self._requests:
            if request.step == self._step + 1:
                batch = await admit(self._client, view, request, wait_s=0.0)
                if self._shared.rotten:
                    await self._check_payload(batch)
                request.step, request.previous_hash = request.step + 1, batch.manifest_hash
                self._batch = batch if request.dp_rank == 0 else self._batch
        assert self._batch is not None
        self._step += 1
        return self._batch

    async def _check_payload(self, batch: PlannedBatch) -> None:
        """Refuse damaged payload, as a replica does that assembles it for the first time."""
        damages = await self._assembler.examine(batch)
        if damages:
            step, sentence = batch.manifest.step, f"damaged payload of {damages[0].key}"
            own_hash = batch.manifest_hash
            await note_damage(
                self._client, self._run, step=step, manifest_hash=own_hash, sentence=sentence
            )
            raise CorruptRecordError(sentence)

    async def _train(self, batch: PlannedBatch) -> None:
        world, history, rng = self._world, self._history, self._rng
        step, own_hash = batch.manifest.step, batch.manifest_hash
        if not self.is_newest:  # a session that sleeps finds out when it wakes up, or soon after
            raise FencedError(f"session {self._name} sleeps while another starts")
        if history.planned.get(step) == own_hash:  # else the store lost both
            self._require_payload(batch.manifest)
        before = history.ever_trained.setdefault(step, own_hash)
        history.all_trained.add((step, own_hash))
        if "cut" in world.counts:  # the step may have been lost while the batch was on its way
            before = history.ever_trained[step] = own_hash
        if before != own_hash:
            world.fail(f"step {step} was {before}, and comes as {own_hash}")
        await asyncio.sleep(rng.random() * 0.3)
        token = await self._step_done(step, own_hash)
        await self._hang()
        await self._announce(step)
        if rng.random() < 0.6 or self._shared.is_closing:
            await asyncio.sleep(rng.random() * _LONGEST_SAVE_S)
            await self._hang()
            await self._commit(token)

    def _require_payload(self, manifest: Manifest) -> None:
        """The payload of a delivered batch is stored."""
        for member in [each for group in manifest.groups for each in group.trajectories]:
            names = keys.trajectory_keys(self._run, member.key.trajectory_id)
            stream: Any = self._world.store.values.get(names.turns.encode())
            if stream is None or len(stream) != len(member.payload_crcs) + 1:
                self._world.fail(f"step {manifest.step} has no payload of {member.key} any more")

    async def _hang(self) -> None:
        """Hang by chance until another session has started: the store must refuse the next call."""
        if self._rng.random() < _HANGS:
            spread_s = _LONGEST_HANG_S - _SHORTEST_HANG_S
            hangs_s = _SHORTEST_HANG_S + self._rng.random() * spread_s
            self._process.hangs_until_s = self._world.now_s + hangs_s
            await asyncio.sleep(hangs_s)

    async def _step_done(self, step: int, manifest_hash: str) -> RecoveryToken:
        """Acknowledge the step after those before."""
        token = await self._with_all_steps(lambda: self._acknowledge(step, manifest_hash))
        pulled = {request.previous_hash for request in self._requests}
        if len(pulled) > 1:
            self._world.fail(f"step {step} is acknowledged, of {sorted(pulled)}")
        self._acknowledged.append((step, manifest_hash))
        return token

    async def _with_all_steps(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of a call that needs all acknowledged steps."""
        try:
            return await call()
        except ConflictError:
            if not self._acknowledged:
                raise
            await self._resend()
        return await call()

    async def _resend(self) -> None:
        """Repeat the newest acknowledgement, and in order those before it that the store lost."""
        lost: list[tuple[int, str]] = []
        for step, manifest_hash in reversed(self._acknowledged):
            try:
                await self._acknowledge(step, manifest_hash)
            except ConflictError:
                lost.append((step, manifest_hash))
            else:
                break
        for step, manifest_hash in reversed(lost):
            await self._acknowledge(step, manifest_hash)
        if self._announced is not None:
            await self._send(self._announced)

    async def _acknowledge(self, step: int, manifest_hash: str) -> RecoveryToken:
        start, history = self._world.store.num_starts, self._history
        if self.is_newest:
            history.newest_stepped = max(history.newest_stepped, step)
        token = await patiently(lambda: self._acknowledge_ranks(step, manifest_hash))
        planned = history.planned.get(step)
        if start == self._world.store.num_starts and planned != manifest_hash:
            self._world.fail(f"step {step} is {planned}, and is acknowledged as {manifest_hash}")
        if self.is_newest:
            history.trained[step] = manifest_hash
        return token

    async def _acknowledge_ranks(self, step: int, manifest_hash: str) -> RecoveryToken:
        """Acknowledge a step on every rank, each with the manifest of its own batch."""
        *others, last = self._requests
        for request in others:
            with contextlib.suppress(NotReadyError):  # the last rank has not called yet
                await self._acknowledge_rank(request, step, manifest_hash)
        return await self._acknowledge_rank(last, step, manifest_hash)

    async def _acknowledge_rank(
        self, request: wire.GetRequest, step: int, manifest_hash: str
    ) -> RecoveryToken:
        stepped = await acknowledge_stepped(
            self._client,
            self._run,
            TrainerRank(self._session_epoch, self._name, request.dp_rank),
            step=step,
            manifest_hash=request.previous_hash if step == self._step else manifest_hash,
        )
        return stepped.token

    async def _announce(self, step: int) -> None:
        self._history.newest_version += 1
        version = self._history.newest_version
        announced = VersionAnnounced(version=version, step=step, lineage=self._lineage)
        await self._send(announced)
        self._announced = announced

    async def _send(self, announced: VersionAnnounced) -> None:
        """Announce a version, or repeat the announcement: the store may have lost it."""
        caller = TrainerRank(self._session_epoch, self._name)
        await patiently(lambda: announce_version(self._client, self._run, caller, announced))

    async def _commit(self, token: RecoveryToken) -> None:
        """Save a checkpoint and acknowledge it; where it is too late, the store must refuse it."""
        retained = self._shared.in_force.retain_checkpoints
        self._history.saved(token, is_newest=self.is_newest, retained=retained)
        await self._with_all_steps(lambda: patiently(lambda: self._commit_ranks(token)))

    async def _commit_ranks(self, token: RecoveryToken) -> None:
        for request in self._requests:
            caller = TrainerRank(self._session_epoch, self._name, request.dp_rank)
            await acknowledge_committed(self._client, self._run, caller, token)
