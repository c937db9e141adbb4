"""The publisher for threads: writes return at once, one daemon thread sends them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Self

from turnstream.errors import ConflictError, FencedError, NotReadyError, TurnstreamError, WaitKind
from turnstream.generator.api.adoption import Reopening
from turnstream.generator.api.group_writers import GroupWriter
from turnstream.generator.api.publisher_core import (
    LAST_FLUSH_S,
    PublisherCore,
    checked_key,
    raise_unread,
    warn_open_trajectories,
)
from turnstream.generator.api.trajectory_writers import TrajectoryWriter
from turnstream.generator.api.work import Task
from turnstream.generator.outbox.inflight import PublisherStatistics
from turnstream.generator.outbox.receipts import Receipt
from turnstream.generator.outbox.trajectory_queue import Lane
from turnstream.generator.transport.sender import Sender
from turnstream.generator.transport.steps import take_steps
from turnstream.store.client.connection import connect
from turnstream.store.run.groups import Refill
from turnstream.store.run.leases import LapsedTrajectory, list_lapsed
from turnstream.store.run.rewards import RewardOutcome
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.types import Group, GroupOpened, TrajectoryKey
from turnstream.types.names import checked_setting
from turnstream.types.scalars import seconds, timeout


class Publisher(PublisherCore[Sender, Receipt, GroupWriter, TrajectoryWriter]):
    """Sends the trajectories of one generator to a run; a context manager.

    Accepted writes are sent until the store acknowledges them, over restarts and while the store is
    full, for at most `timeout_s`. Several threads may use it.

    Its thread also renews the leases of the open trajectories. A trajectory whose lease was lost,
    for example while the machine slept, raises FencedError with its new owner. The others continue.

    Args:
        url: `redis://`, `rediss://` or `unix://` address of the store.
        run: name of the run, which must exist. The first contact with the store finds the run that
            has the name then; this publisher never writes to a later run of that name.
        writer: name of this generator, which holds the leases of its trajectories; the same name
            again is the same generator. None makes a name up.
        max_inflight_bytes: limit of the unacknowledged bytes; writes wait above it.
        timeout_s: how long the store may be away or full before accepted writes fail.
        admission_timeout_s: how long a group may wait for admission.
        keep_s: seconds for which acknowledged writes are kept, to be sent again to a restarted
            store that lost them; 0 keeps nothing. Nothing is kept for a store that syncs before it
            answers.
        max_kept_bytes: limit of the kept bytes; beyond it the oldest turns are dropped.
    """

    def _connect(self, url: str) -> Sender:
        self._client = connect(url)  # connects when it is first used
        return Sender(url, self._outbox)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        try:
            with contextlib.suppress(NotReadyError):
                self._sender.flush(LAST_FLUSH_S)
        finally:
            self._close()

    def lapsed(self) -> list[LapsedTrajectory]:
        """Trajectories of the run that may be adopted now, the longest lapsed first.

        At most MAX_LAPSED of them. Another generator may be faster.

        Raises:
            RunNotFoundError: no such run.
            StoreUnavailableError: the store cannot be reached, or did not answer for `timeout_s`.
        """
        wait = self._wait(f"run {self._outbox.run!r}: what has lapsed was not listed")
        run = take_steps(self._client, self._found(), wait)
        with wait.bounded():
            return list_lapsed(self._client, run)

    def adopt(self, group_id: str, sample: int, attempt: int = 0) -> TrajectoryWriter:
        """Continue a trajectory whose writer is gone, from the next turn.

        The returned writer has its stored turns in `turns`. Later writes of the earlier writer are
        refused. A generator of the same name as the earlier writer does not wait for the end of the
        lease.

        Raises:
            InvalidTurnError: the key is invalid.
            ConflictError: its lease lasts for `retry_after_s` more, or it is not open.
            FencedError: another generator was faster.
            RecordError: a stored turn is damaged; the trajectory lapses later.
            StoreUnavailableError: the store cannot be reached, or did not answer for `timeout_s`.
        """
        key = checked_key(group_id, sample, attempt)
        declared = self._sender.learn_columns()
        wait = self._wait(f"run {self._outbox.run!r}: {key.readable_name} was not adopted")
        return take_steps(self._client, self._adopt(key, declared), wait)

    def post_reward(
        self,
        key: TrajectoryKey,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
    ) -> RewardOutcome:
        """Give a trajectory that was sealed with `awaits_reward` its reward.

        The trajectory may be another generator's. See `turnstream.store.run.rewards.post_reward`.
        """
        post, receipt = self._reward(key, reward, reward_components)
        receipt.result()
        return RewardOutcome(post.outcome)

    def next_refill(self, timeout_s: float) -> Refill:
        """Take a sample that is to be tried again, in a group of any generator.

        The attempt is open and this publisher's; `refill_trajectory` writes it.

        Raises:
            NotReadyError: there was none within `timeout_s`.
            RunNotFoundError: no such run.
            StoreUnavailableError: the store cannot be reached, or did not answer by then.
        """
        timeout_s = seconds(timeout_s, field="timeout_s")
        what = f"run {self._outbox.run!r}: no sample was to be tried again"
        wait = self._wait(what, WaitKind.NO_REFILL, timeout_s)
        return take_steps(self._client, self._next_refill(wait), wait)

    def next_task(self, wait_s: float) -> Task[TrajectoryWriter]:
        """Take the next task of the run: a refill if there is one, else the next prompt.

        The trajectories of the task are open, and this publisher renews their leases.

        Args:
            wait_s: how long to wait for a task, and for the admission of its group.

        Raises:
            NotReadyError: there was none within `wait_s`, with the reason.
            PromptsExhaustedError: every prompt of the run was done by then.
            EndOfRunError: the run is closed.
            StoreUnavailableError: the store cannot be reached, or did not answer by then.
        """
        self._sender.require_open()
        wait_s = seconds(wait_s, field="wait_s")
        wait = self._wait(f"run {self._outbox.run!r}: no task", WaitKind.NO_TASK, wait_s)
        task, trajectories = take_steps(self._client, self._next_task(wait), wait)
        return Task(task, trajectories)

    def publish(self, group: Group) -> Receipt:
        """Send a whole finished group; its samples must be 0 to n - 1.

        Waits only while there is too much on its way, and at first until the run has said what it
        declares. The receipt is done when the run knows of every trajectory; one that fails does
        not stop the others, and `receipt.errors` names it.

        Raises:
            InvalidTurnError: something in it is wrong; nothing of it was accepted.
        """
        try:
            declared = self._sender.learn_columns()
        except TurnstreamError as error:
            return self._failed(error)
        opening, drafted = self._drafted(group, declared)
        self._sender.wait_until(self._has_capacity(drafted), timeout_s=self._capacity_timeout_s)
        return self._sent(opening, drafted)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted is acknowledged.

        Raises:
            NotReadyError: writes are unacknowledged after `timeout_s`.
            TurnstreamError: a published group failed, and its receipt was not read; or the store
                lost acknowledged writes that are no longer kept. Several errors are one, with
                `others`.
        """
        self._sender.flush(timeout(timeout_s, field="timeout_s"))
        raise_unread(self._unread_failures, self._outbox.take_losses())

    def flush_to_disk(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted is on the store's disk.

        A store that does not sync before it answers has synced when it still answers `keep_s`
        later. So this takes `keep_s` after the last write of any thread.

        Raises:
            NotReadyError: writes may not be on disk after `timeout_s`.
            TurnstreamError: see `flush`.
        """
        self._sender.flush_to_disk(timeout(timeout_s, field="timeout_s"))
        self.flush(timeout_s)

    def statistics(self) -> PublisherStatistics:
        """Return the counts so far."""
        with self._sender.lock:
            return self._outbox.statistics()

    def close_run(self, reason: str = "") -> None:
        """Send what was accepted, then close the run to new groups."""
        checked_setting(reason, field="reason")
        self.flush()
        self._closing(reason).result()

    def close(self, timeout_s: float | None = None) -> None:
        """Send all accepted writes, then disconnect. Safe to repeat.

        Open trajectories stay open until their leases end. This generator, by its name, may adopt
        them before that, and any other after it; see `lease_s` and `takeover_s` of the run.

        Raises:
            NotReadyError: writes were unacknowledged after `timeout_s`, and have failed.
            TurnstreamError: a published group failed, and its receipt was not read.
        """
        timeout_s = timeout(timeout_s, field="timeout_s")
        try:
            self.flush(timeout_s)
        finally:
            self._close()

    def _wait(
        self, what: str, kind: WaitKind | None = None, wait_s: float | None = None
    ) -> StoreWait:
        wait_s = self._outbox.timeout_s if wait_s is None else wait_s
        return StoreWait(self._client, kind, what, wait_s=wait_s)

    def _close(self) -> None:
        with self._sender.lock:
            warn_open_trajectories(self._outbox)
        self._sender.close()
        self._client.close()

    def _group_writer(self, group: GroupOpened, *, exist_ok: bool) -> GroupWriter:
        reopen = self._reopen if exist_ok else None
        return GroupWriter(
            self._sender, self._outbox, group, make_writer=self._writer, reopen=reopen
        )

    def _reopen(self, group: GroupOpened) -> Reopening[TrajectoryWriter]:
        """Return the unfinished samples of a group that may exist, those without turns adopted."""
        wait = self._wait(f"run {self._outbox.run!r}: group {group.group_id} was not read")
        unfinished = take_steps(self._client, self._unfinished(group), wait)
        reopening = Reopening[TrajectoryWriter](group.group_id, unfinished)
        while reopening.pending:
            for sample in [*reopening.pending]:
                if self._is_written_here(TrajectoryKey(group.group_id, sample)):
                    reopening.skip(sample)
                    continue
                try:
                    reopening.adopted(sample, self.adopt(group.group_id, sample))
                except (ConflictError, FencedError) as error:
                    reopening.refused(sample, error)
            time.sleep(reopening.pause_s)
        return reopening

    def _writer(
        self, group: GroupOpened, key: TrajectoryKey, lane: Lane | None = None
    ) -> TrajectoryWriter:
        return TrajectoryWriter(self._sender, self._outbox, group, key, lane)
