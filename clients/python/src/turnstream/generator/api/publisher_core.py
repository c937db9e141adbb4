"""The one implementation of both publishers, in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, NoReturn, TypeVar

from turnstream.errors import (
    InvalidConfigError,
    InvalidTurnError,
    NotReadyError,
    TurnstreamError,
)
from turnstream.generator.api.group_writers import GroupWriterBase
from turnstream.generator.api.sessions import SessionMaker
from turnstream.generator.api.trajectory_core import TrajectoryWriterBase
from turnstream.generator.api.work import Reopened, WorkQueue, adopt_trajectory, adopt_unfinished
from turnstream.generator.encode.encoder import AdoptedTurn, DraftedGroup, draft_group
from turnstream.generator.encode.group_checks import checked_name, checked_opening
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import PendingWrite, PublisherStatistics, raise_unread
from turnstream.generator.outbox.resend import KEEP_S, MAX_KEPT_BYTES
from turnstream.generator.outbox.writes import TargetRun, TrajectoryQueue
from turnstream.generator.requests import ListLapsed, ReadGroup
from turnstream.generator.transport.sender import Sender
from turnstream.generator.transport.transport import BoundedCalls, Transport, transport_to
from turnstream.store.client.addresses import address_of, checked_url
from turnstream.store.client.cancellation import to_the_end
from turnstream.store.run.groups import LapsedTrajectory, parse_lapsed, parse_unfinished
from turnstream.store.run.rewards import RewardOutcome, encode_reward
from turnstream.store.run.tasks import OfferedTask, Refill, TakenTask
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.types import Group, GroupOpened, Purpose, TrajectoryKey
from turnstream.types.names import checked_setting, flag, quoted, seconds, timeout, whole_number

MAX_INFLIGHT_BYTES: Final = 64 * 1024 * 1024
TIMEOUT_S: Final = 300.0
ADMISSION_TIMEOUT_S: Final = 3600.0

_LAST_FLUSH_S: Final = 10.0
"""How long a publisher that an exception has left still tries to send the accepted writes."""

_logger = logging.getLogger(__name__)

_Receipt = TypeVar("_Receipt", bound=PendingWrite)
_Writer = TypeVar("_Writer", bound=TrajectoryWriterBase[Any, Any])
_GroupWriter = TypeVar("_GroupWriter", bound=GroupWriterBase[Any, Any])


class PublisherCore(ABC, Generic[_Receipt, _GroupWriter, _Writer]):
    """Sends the trajectories of one generator to a run. Its arguments: see Publisher."""

    _group_kind: type[_GroupWriter]
    _writer_kind: type[_Writer]

    def __init__(
        self,
        url: str,
        run: str,
        *,
        writer: str | None = None,
        max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
        timeout_s: float = TIMEOUT_S,
        admission_timeout_s: float = ADMISSION_TIMEOUT_S,
        keep_s: float = KEEP_S,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._address = address_of(checked_url(url))
        if writer is None:
            writer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        checked_name(run, field="run")
        self._outbox = Outbox(
            TargetRun(run),
            checked_name(writer, field="writer"),
            max_inflight_bytes=_num_bytes(max_inflight_bytes, field="max_inflight_bytes"),
            timeout_s=seconds(timeout_s, field="timeout_s", least=0),
            admission_timeout_s=seconds(admission_timeout_s, field="admission_timeout_s", least=0),
            jitter=random.random,
            address=self._address,
            keep_s=seconds(keep_s, field="keep_s", least=0),
            max_kept_bytes=_num_bytes(max_kept_bytes, field="max_kept_bytes"),
        )
        self._transport = transport_to(url, writer=self._outbox.writer)
        self._sender = self._make_sender(self._transport)
        self._unread_failures: list[PendingWrite] = []
        self._work = WorkQueue(self._outbox.writer)
        self._sessions = SessionMaker(url, lambda: self._found(self._calls("no session was made")))

    def group(
        self,
        group_id: str,
        num_samples: int,
        *,
        num_needed: int | None = None,
        prompt_uid: str = "",
        purpose: Purpose | str = Purpose.TRAIN,
        exist_ok: bool = False,
    ) -> _GroupWriter:
        """Return a group of which this publisher writes every sample.

        Entering it waits for admission and opens all samples at once. Leaving it abandons the
        samples without a seal, so that the group can end, and logs a warning with their numbers.

        Args:
            group_id: name of the group; a run uses it once.
            num_samples: number of its trajectories.
            num_needed: members that decide the group, the first that are sealed; None for all.
                Masked ones may not count, see `BatchingConfig.masked_reward`.
            prompt_uid: the dataset's name of the prompt.
            purpose: "train", or "eval" for a group that waits for bytes alone and is never trained.
            exist_ok: accept a group that was opened before, and iterate over its unfinished
                samples only. So a restarted generator can iterate over its prompts again. A sample
                that an earlier process left with turns and without a seal starts again: its writer
                has the next `attempt`, and the group waits for it. Samples of another writer are
                adopted when their lease ends (at most `lease_s` of the run), or left to that
                writer if it renews the lease. A publisher with the same `writer` as
                before does not wait.

        Raises:
            InvalidTurnError: the name or a number is invalid.
            ConflictError: on entering, the group was opened before, and `exist_ok` is False or its
                `num_samples` differs.
        """
        group = checked_opening(
            group_id, num_samples, prompt_uid, num_needed=num_needed, purpose=purpose
        )
        reopen = self._reopen if flag(exist_ok, field="exist_ok") else None
        return self._group_kind(
            self._sender,
            self._outbox,
            group,
            make_writer=self._writer,
            reopen=reopen,
            sessions=self._sessions,
        )

    def trajectory(
        self,
        group_id: str,
        sample: int,
        *,
        num_samples: int,
        num_needed: int | None = None,
        prompt_uid: str = "",
        purpose: Purpose | str = Purpose.TRAIN,
        attempt: int = 0,
    ) -> _Writer:
        """Return the writer of one sample of a group that several generators may share.

        Entering it opens the group, and waits for admission.

        Args:
            group_id: the same for all samples that are compared with each other.
            sample: from 0 to `num_samples` - 1.
            num_samples: see `group`.
            num_needed: see `group`.
            prompt_uid: see `group`.
            purpose: see `group`.
            attempt: number of the retry of an abandoned sample, at most one above its highest
                known attempt. A sample has at most 1,000 attempts, and fewer in a large group:
                512 in one of 8 samples, 4 in one of 1,024.

        Raises:
            InvalidTurnError: the key is invalid; entering it, if the attempt is too high.
        """
        group = checked_opening(
            group_id, num_samples, prompt_uid, num_needed=num_needed, purpose=purpose
        )
        return self._writer(group, TrajectoryKey(group_id, sample, attempt))

    def refill_trajectory(self, refill: Refill) -> _Writer:
        """Return the writer of an attempt that `next_refill` returned.

        Raises:
            InvalidTurnError: it is no Refill.
        """
        if not isinstance(refill, Refill):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurnError("refill", f"{quoted(refill)} is not a Refill")
        return self._writer(refill.group, refill.key)

    def statistics(self) -> PublisherStatistics:
        """Return the counts so far."""
        self._sender.process.require()
        with self._sender.lock:
            return self._outbox.statistics()

    def __reduce__(self) -> NoReturn:
        self._sender.process.refuse_pickle()

    @abstractmethod
    def _make_sender(self, transport: Transport) -> Sender[_Receipt]: ...

    def _writer(
        self,
        group: GroupOpened,
        key: TrajectoryKey,
        queue: TrajectoryQueue | None = None,
        stored: Sequence[AdoptedTurn] = (),
    ) -> _Writer:
        return self._writer_kind(self._sender, self._outbox, group, key, queue, stored)

    def _calls(
        self, what: str, awaited: str | None = None, wait_s: float | None = None
    ) -> BoundedCalls:
        """Return the calls of a wait; without a deadline of its own it has the publisher's."""
        self._sender.check_caller()
        wait_s = self._outbox.timeout_s if wait_s is None else wait_s
        clock = asyncio.get_running_loop().time
        what = f"run {self._outbox.run!r}: {what}"
        wait = StoreWait(self._address, awaited, what, wait_s=wait_s, clock=clock)
        return BoundedCalls(self._transport, wait)

    async def _found(self, calls: BoundedCalls) -> str:
        """Return the id of the run; only the first call asks the store."""
        target = self._outbox.target
        if not target.is_found:
            target.found(await calls.find_run(target.run))
        return self._outbox.run

    async def _lapsed(self) -> list[LapsedTrajectory]:
        calls = self._calls("lapsed trajectories were not listed")
        return parse_lapsed(await calls.reply(ListLapsed(await self._found(calls))))

    async def _adopt(self, key: TrajectoryKey) -> _Writer:
        self._sender.require_open()
        outbox = self._outbox
        declared = await self._sender.learn_columns()
        adopted = await adopt_trajectory(
            self._calls(f"{key.readable_name} was not adopted"),
            outbox.run,
            writer=outbox.writer,
            key=key,
            declared=declared,
        )
        queue = self._sender.put(
            lambda: outbox.tracker.adopt(
                key,
                epoch=adopted.epoch,
                num_turns=len(adopted.turns),
                num_bytes=sum(len(each.stored.record) for each in adopted.turns),
                now_s=time.monotonic(),
            )
        )
        group = GroupOpened(group_id=key.group_id, prompt_uid="", num_samples=adopted.num_samples)
        return self._writer(group, key, queue, adopted.turns)

    async def _reopen(self, group: GroupOpened) -> Reopened[_Writer]:
        """Return the unfinished samples of a group that may exist; the open ones are adopted."""
        calls = self._calls(f"group {group.group_id} was not read")
        run = await self._found(calls)
        reply = await calls.reply(ReadGroup(run, group.group_id, group.num_samples))

        def is_written_here(sample: int) -> bool:
            keys = {TrajectoryKey(group.group_id, sample)}
            return self._sender.put(lambda: self._outbox.tracker.has_any(keys))

        return await adopt_unfinished(
            group,
            parse_unfinished(reply, num_samples=group.num_samples),
            is_written_here=is_written_here,
            adopt=lambda *attempt: self._adopt(TrajectoryKey(group.group_id, *attempt)),
        )

    async def _post_reward(
        self,
        key: TrajectoryKey,
        reward: float | None,
        reward_components: Mapping[str, float] | None,
    ) -> RewardOutcome:
        trajectory_id, record = encode_reward(key, reward, reward_components)
        receipt = self._sender.loop_receipt()
        calls = self._outbox.run_calls
        post = self._sender.put(lambda: calls.post_reward(trajectory_id, record, receipt))
        await receipt
        return RewardOutcome(post.outcome)

    async def _next_refill(self, timeout_s: float) -> Refill:
        timeout_s = seconds(timeout_s, field="timeout_s")
        calls = self._calls("no sample was to be tried again", "refill", timeout_s)
        return await self._work.next_refill(await self._found(calls), calls)

    async def _next_task(self, wait_s: float) -> tuple[OfferedTask, list[_Writer]]:
        self._sender.require_open()
        calls = self._calls("no task", "task", seconds(wait_s, field="wait_s"))
        run = await self._found(calls)
        return await self._work.next_task(run, calls, adopt=self._writers_of)

    def _writers_of(self, taken: TakenTask) -> list[_Writer]:
        """Return the writers of a task; none if this publisher writes it already."""
        task, outbox = taken.task, self._outbox

        def adopt() -> list[TrajectoryQueue]:
            if outbox.tracker.has_any(taken.epochs.keys()):
                return []  # a restarted store grants such a task again
            return outbox.admissions.begin_opened(
                task.group, taken.epochs, now_s=time.monotonic(), prompt_number=task.number
            )

        queues = self._sender.put(adopt)
        return [self._writer(task.group, queue.key, queue) for queue in queues]

    async def _publish(self, group: Group) -> _Receipt:
        try:
            declared = await self._sender.learn_columns()
        except TurnstreamError as error:
            self._sender.require_open()
            receipt = self._sender.receipt(unread_failures=self._unread_failures)
            receipt.settle(None, error)
            return receipt
        whole = draft_group(group, extra_columns=declared)
        await self._wait_for_capacity(whole)
        return self._send(whole)

    def _has_capacity(self, whole: DraftedGroup) -> bool:
        return self._outbox.inflight.has_capacity_for_group(whole.num_bytes)

    async def _wait_for_capacity(self, whole: DraftedGroup) -> None:
        """Wait for capacity for a finished group, which depends on the admission of others."""
        await self._sender.wait_for_capacity(
            lambda: self._has_capacity(whole),
            timeout_s=self._outbox.timeout_s + self._outbox.admission_timeout_s,
        )

    def _send(self, whole: DraftedGroup) -> _Receipt:
        """Send a finished group; its receipt has one part per trajectory."""
        end = self._sender.receipt(len(whole.trajectories), unread_failures=self._unread_failures)
        self._sender.put(lambda: self._outbox.put_group(whole, end))
        return end

    async def _flush(self, timeout_s: float | None) -> None:
        await self._sender.flush(timeout(timeout_s, field="timeout_s"))
        self._raise_unread()

    def _raise_unread(self) -> None:
        with self._sender.lock:
            losses = self._outbox.take_losses()
        raise_unread(self._unread_failures, losses)

    async def _flush_to_disk(self, timeout_s: float | None) -> None:
        await self._sender.flush_to_disk(timeout(timeout_s, field="timeout_s"))
        await self._flush(timeout_s)

    async def _close_run(self, reason: str) -> None:
        checked_setting(reason, field="reason")
        await self._flush(None)
        receipt = self._sender.loop_receipt()
        self._sender.put(lambda: self._outbox.run_calls.close_run(reason, receipt))
        await receipt

    async def _close(self, timeout_s: float | None) -> None:
        timeout_s = timeout(timeout_s, field="timeout_s")
        self._sender.check_caller()
        try:
            await self._flush(timeout_s)
        finally:
            await self._disconnect()

    async def _exit(self, error: BaseException | None) -> None:
        if error is None:
            await self._close(None)
            return
        self._sender.check_caller()
        try:
            with contextlib.suppress(NotReadyError):
                await self._sender.flush(_LAST_FLUSH_S)
        finally:
            await self._disconnect()

    async def _disconnect(self) -> None:
        if num_open := self._outbox.tracker.heartbeats.num_open:
            _logger.warning(
                "run %s: %s leaves %d trajectories open: when their leases end they may be "
                "adopted, or are abandoned",
                *(self._outbox.run, self._outbox.writer, num_open),
            )

        await to_the_end(self._sender.close())


def _num_bytes(value: int, *, field: str) -> int:
    return whole_number(value, field=field, limit=2**63, refusal=InvalidConfigError)
