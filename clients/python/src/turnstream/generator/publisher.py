"""The publisher for threads: writes return at once, one daemon thread sends them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from turnstream.errors import NotReadyError, RejectedError, TurnstreamError
from turnstream.generator import writers
from turnstream.generator.checks import checked_turn
from turnstream.generator.drafts import draft_group
from turnstream.generator.extras import with_checked_extras
from turnstream.generator.lanes import Lane, RewardPost
from turnstream.generator.outbox import Outbox
from turnstream.generator.receipts import Delivery, Receipt
from turnstream.generator.refills import take_refill
from turnstream.generator.sender import Sender
from turnstream.generator.statistics import PublisherStatistics
from turnstream.generator.takeovers import take_over
from turnstream.generator.tasks import Task, take_task, task_states
from turnstream.generator.window import KEEP_S, MAX_KEPT_BYTES
from turnstream.generator.writers import WriterState
from turnstream.store.connection import connect
from turnstream.store.groups import Refill
from turnstream.store.leases import LapsedTrajectory, list_lapsed
from turnstream.store.rewards import RewardOutcome, reward_command
from turnstream.types import Group, GroupOpened, Purpose, Status, TrajectoryKey, Turn, VersionRun


class Publisher:
    """Sends the trajectories of one generator to a run; a context manager.

    What it has accepted is sent until the store acknowledges it, over restarts and while the store
    is full, for at most `timeout_s`. May be used from several threads.

    Its thread also keeps the leases of the open trajectories, whatever the caller does meanwhile.
    One that was lost all the same, as after a long sleep of the machine, raises FencedError, which
    says who has it, from whatever is called on it; the others go on.

    Args:
        url: `redis://`, `rediss://` or `unix://` address of the store.
        run: name of the run, which must exist.
        writer: name of this generator, which holds the leases of its trajectories; the same name
            again is the same generator. None makes a name up.
        max_inflight_bytes: accepted and not yet acknowledged; writes wait above it.
        timeout_s: how long the store may be away or full before accepted writes fail.
        admission_timeout_s: how long a group may wait for leave to start.
        keep_s: for how long what the store has acknowledged is kept, to be sent again to a store
            that comes back without it; 0 keeps nothing. Nothing is kept for a store that syncs
            before it answers.
        max_kept_bytes: bound of that; beyond it the oldest turns are kept for less long.
    """

    def __init__(
        self,
        url: str,
        run: str,
        *,
        writer: str | None = None,
        max_inflight_bytes: int = writers.MAX_INFLIGHT_BYTES,
        timeout_s: float = writers.TIMEOUT_S,
        admission_timeout_s: float = writers.ADMISSION_TIMEOUT_S,
        keep_s: float = KEEP_S,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._outbox = writers.new_outbox(
            run,
            writer=writer,
            max_inflight_bytes=max_inflight_bytes,
            timeout_s=timeout_s,
            admission_timeout_s=admission_timeout_s,
            keep_s=keep_s,
            max_kept_bytes=max_kept_bytes,
        )
        self._sender = Sender(url, run, self._outbox)
        self._client = connect(url)  # for calls that wait for an answer; connects when used
        self._unread_failures: list[Delivery] = []
        self._tried_refills: dict[TrajectoryKey, object] = {}
        self._url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        try:
            with contextlib.suppress(NotReadyError):
                self._sender.flush(writers.LAST_FLUSH_S)
        finally:
            self._close()

    def group(
        self,
        group_id: str,
        num_samples: int,
        *,
        num_needed: int | None = None,
        prompt_uid: str = "",
        purpose: Purpose | str = Purpose.TRAIN,
    ) -> GroupWriter:
        """A group of which this publisher writes every sample.

        Entering it waits for leave to start and opens all its samples at once. Leaving it abandons
        the samples that were never started, so that the group can end.

        Raises:
            InvalidTurnError: the name or the number cannot be.
        """
        group = writers.checked_opening(
            group_id, num_samples, prompt_uid, num_needed=num_needed, purpose=purpose
        )
        return GroupWriter(self._sender, self._outbox, group)

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
    ) -> TrajectoryWriter:
        """One sample of a group that several generators may share.

        Entering it waits for leave, where the group is new.

        Args:
            group_id: the same for all samples that are compared with each other.
            sample: from 0 to `num_samples` - 1.
            num_samples: of the group.
            num_needed: members that decide the group, the first that are sealed; None for all.
            prompt_uid: the dataset's name of the prompt.
            purpose: "eval" waits for bytes alone and is never trained: `turnstream evals`.
            attempt: another one of a sample that was given up before, below 1,000.

        Raises:
            InvalidTurnError: the key cannot be.
        """
        group = writers.checked_opening(
            group_id, num_samples, prompt_uid, num_needed=num_needed, purpose=purpose
        )
        key = TrajectoryKey(group_id, sample, attempt)
        return TrajectoryWriter(self._sender, WriterState(self._outbox, group, key, None))

    def lapsed(self) -> list[LapsedTrajectory]:
        """Trajectories of the run that may be taken over now, the longest lapsed first.

        At most MAX_LAPSED of them. Another generator may be faster.

        Raises:
            RunNotFoundError: no such run.
            StoreUnavailableError: the store cannot be reached.
        """
        return list_lapsed(self._client, self._outbox.run)

    def take_over(self, group_id: str, sample: int, attempt: int = 0) -> TrajectoryWriter:
        """Go on with a trajectory whose writer is gone, from the next turn.

        Its stored turns are `turns` of the writer that this gives; whoever wrote it before is
        refused from now on. The generator that began it, by its name, need not wait until its lease
        has ended.

        Raises:
            InvalidTurnError: the key cannot be.
            ConflictError: its lease has not ended, which `retry_after_s` says, or it is not open.
            FencedError: another generator was faster.
            RecordError: a stored turn is damaged; the trajectory is left to lapse.
            StoreUnavailableError: the store cannot be reached.
        """
        key = writers.checked_key(group_id, sample, attempt)
        outbox = self._outbox
        declared = self._sender.learn_columns()
        taken = take_over(
            self._client, outbox.run, writer=outbox.writer, key=key, declared=declared
        )
        now_s = time.monotonic()
        state = self._sender.put(lambda: WriterState.taken_over(outbox, key, taken, now_s))
        return TrajectoryWriter(self._sender, state)

    def post_reward(
        self,
        key: TrajectoryKey,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
    ) -> RewardOutcome:
        """Give a trajectory that was sealed with `awaits_reward` its reward.

        The trajectory may be another generator's. See `turnstream.store.rewards.post_reward`.
        """
        command = reward_command(self._outbox.run, key, reward, reward_components)
        post = RewardPost(command, receipt := Receipt(self._sender.lock))
        self._sender.put(lambda: self._outbox.post_reward(post))
        receipt.result()
        return RewardOutcome(post.outcome)

    def next_refill(self, timeout_s: float) -> Refill:
        """Take a sample that is to be tried again, in a group of any generator.

        The attempt is open and this publisher's; `refill_trajectory` writes it.

        Raises:
            NotReadyError: there was none within `timeout_s`.
            StoreUnavailableError: the store cannot be reached.
        """
        return take_refill(
            self._client,
            self._outbox.run,
            writer=self._outbox.writer,
            timeout_s=timeout_s,
            tried=self._tried_refills,
        )

    def refill_trajectory(self, refill: Refill) -> TrajectoryWriter:
        """The writer of an attempt that `next_refill` gave."""
        state = WriterState(self._outbox, refill.group, refill.key, None)
        return TrajectoryWriter(self._sender, state)

    def next_task(self, wait_s: float) -> Task[TrajectoryWriter]:
        """Take what the run gives out: a refill if there is one, else the next prompt.

        The trajectories of the task are open and this publisher's, which keeps their leases.

        Args:
            wait_s: how long to wait for a task, and for leave to start its group.

        Raises:
            NotReadyError: there was none within `wait_s`, and why.
            PromptsExhaustedError: every prompt of the run was done by then.
            EndOfRunError: the run is closed.
            StoreUnavailableError: the store cannot be reached.
        """
        outbox = self._outbox
        self._sender.require_open()
        taken = take_task(self._client, outbox.run, writer=outbox.writer, wait_s=wait_s)
        now_s = time.monotonic()
        states = self._sender.put(lambda: task_states(outbox, taken, now_s))
        return Task(taken, [TrajectoryWriter(self._sender, each) for each in states])

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
        drafted = draft_group(group, extra_columns=declared)
        opening = writers.checked_opening(
            group.group_id, len(drafted), group.prompt_uid, purpose=group.purpose
        )
        receipt = Receipt(self._sender.lock, len(drafted), unread_failures=self._unread_failures)
        num_bytes = sum(len(turn.record) for made in drafted for turn in made.turns)
        self._sender.wait_until(lambda: self._outbox.tally.has_room_for_group(num_bytes))
        self._sender.put(
            lambda: writers.send_group(self._outbox, group=opening, drafted=drafted, end=receipt)
        )
        return receipt

    def _failed(self, error: TurnstreamError) -> Receipt:
        """The receipt of a group that could not be checked, since the run did not answer."""
        self._sender.require_open()
        receipt = Receipt(self._sender.lock, unread_failures=self._unread_failures)
        receipt.settle(None, error)
        return receipt

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted is acknowledged.

        Raises:
            NotReadyError: that was not so within `timeout_s`.
            TurnstreamError: a published group failed, and its receipt was not asked; or the store
                came back without something that it had acknowledged and that is no longer kept.
        """
        self._sender.flush(timeout_s)
        writers.raise_unread(self._unread_failures, self._outbox.take_losses())

    def flush_to_disk(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted is on the store's disk, as far as that can be known.

        A store that does not sync before it answers has synced when it still answers `keep_s`
        later: so long this takes, behind the last write of any thread. Whoever closes before gives
        up what could be sent again.

        Raises:
            NotReadyError: that was not so within `timeout_s`.
            TurnstreamError: see `flush`.
        """
        self._sender.flush_to_disk(timeout_s)
        self.flush(timeout_s)

    def statistics(self) -> PublisherStatistics:
        """What happened so far."""
        with self._sender.lock:
            return self._outbox.statistics()

    def close_run(self, reason: str = "") -> None:
        """Send what was accepted, then close the run to new groups."""
        self.flush()
        receipt = Receipt(self._sender.lock)
        self._sender.put(lambda: self._outbox.close_run(reason, receipt))
        receipt.result()

    def close(self, timeout_s: float | None = None) -> None:
        """Send what was accepted, then disconnect. Safe to repeat.

        Trajectories that are open stay so until their leases end: until then this generator, by its
        name, may take them over, then any other; see `lease_s` and `takeover_s` of the run.

        Raises:
            NotReadyError: not all of it was sent within `timeout_s`; the rest was given up.
            TurnstreamError: a published group failed, and its receipt was not asked.
        """
        try:
            self.flush(timeout_s)
        finally:
            self._close()

    def _close(self) -> None:
        with self._sender.lock:
            writers.tell_what_stays_open(self._outbox)
        self._sender.close()
        self._client.close()


class GroupWriter:
    """A group being written; a context manager. Made by `Publisher.group`."""

    def __init__(self, sender: Sender, outbox: Outbox, group: GroupOpened) -> None:
        self._sender = sender
        self._outbox = outbox
        self._group = group
        self._lanes: list[Lane] = []
        self._writers: dict[int, TrajectoryWriter] = {}

    def __enter__(self) -> Self:
        group = self._group
        members = [TrajectoryKey(group.group_id, sample) for sample in range(group.num_samples)]
        opened = Receipt(self._sender.lock)
        self._lanes = self._sender.put(lambda: self._outbox.admit(group, members, opened=opened))
        try:
            opened.result()
        except BaseException as error:
            self._give_up(error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._give_up(error)

    def trajectory(self, sample: int) -> TrajectoryWriter:
        """The writer of one sample, open already; the same writer for the same sample.

        Raises:
            InvalidTurnError: the group has no such sample.
            RejectedError: the group was not entered.
        """
        writer = self._writers.get(sample)
        if writer is None:
            if not self._lanes:
                raise RejectedError(f"group {self._group.group_id!r} is not open: use it in `with`")
            key = TrajectoryKey(self._group.group_id, sample)
            state = WriterState(self._outbox, self._group, key, None)
            state.lane = self._lanes[sample]
            writer = self._writers[sample] = TrajectoryWriter(self._sender, state)
        return writer

    def _give_up(self, error: BaseException | None) -> None:
        """Abandon whatever was not sealed."""
        for sample in range(len(self._lanes)):
            is_started = sample in self._writers
            writer = self.trajectory(sample)
            if not writer.has_ended:
                reason = writers.NOT_STARTED if error is None and not is_started else ""
                writer.abandon(reason or writers.reason_of(error))


class TrajectoryWriter:
    """A trajectory being written; a context manager. Made by `Publisher` and `GroupWriter`.

    Leaving it by an exception, or without `seal`, abandons the trajectory. Several threads may
    append: the turns are numbered here.
    """

    def __init__(self, sender: Sender, state: WriterState) -> None:
        self._sender = sender
        self._state = state
        self._order = threading.Lock()

    def __enter__(self) -> Self:
        with self._order:
            self._opened_lane()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self.has_ended:
            self.abandon(writers.reason_of(error))

    @property
    def key(self) -> TrajectoryKey:
        """The name of the trajectory in its run."""
        return self._state.key

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns that were stored when it was taken over, whole; empty if it was not."""
        return self._state.turns

    @property
    def has_ended(self) -> bool:
        """Whether it was sealed or abandoned."""
        return self._state.has_ended

    def append(
        self,
        prompt_ids: Any,
        response_ids: Any,
        *,
        logprobs: Any = None,
        loss_mask: Any = None,
        rewards: Any = None,
        version: int | None = None,
        version_runs: Sequence[VersionRun] = (),
        extras: Mapping[str, Any] | None = None,
        allow_empty: bool = False,
    ) -> Receipt:
        """Send one turn, and return before the store has answered.

        Args:
            prompt_ids: every token that the model saw, those of earlier turns included; what an
                earlier turn holds is found and not sent again.
            response_ids: the sampled tokens.
            logprobs: one per response token, in nats, under the sampling policy.
            loss_mask: one per response token, 1 where it is trained; None trains all.
            rewards: one per response token; None for none.
            version: of the weights that sampled the response.
            version_runs: where several versions sampled it.
            extras: values of the columns that the run declares, by name, each said of the whole
                turn, as `prompt_ids` is: see `turnstream.types.extras`.
            allow_empty: accept a response without tokens.

        Raises:
            InvalidTurnError: names field, value and position; nothing was accepted.
            RejectedError: the trajectory has ended.
            TurnstreamError: an earlier write of this trajectory failed, and why.
        """
        turn = checked_turn(
            prompt_ids,
            response_ids,
            logprobs=logprobs,
            loss_mask=loss_mask,
            rewards=rewards,
            version=version,
            version_runs=version_runs,
            allow_empty=allow_empty,
        )
        turn = with_checked_extras(turn, extras, self._sender.learn_columns())
        receipt = Receipt(self._sender.lock)
        with self._order:
            lane = self._opened_lane()
            # Room first: whatever the draft has counted must be sent.
            self._sender.wait_until(lambda: self._state.has_room(turn))
            made = self._state.draft.add(turn)
            self._sender.put(lambda: self._state.append(lane, made, receipt))
        return receipt

    def seal(
        self,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
        status: Status | str = Status.COMPLETED,
        sampling: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        awaits_reward: bool = False,
    ) -> None:
        """End the trajectory and wait until the run knows of it.

        Args:
            reward: of the whole episode; None where the turns or the components carry it.
            reward_components: named rewards.
            status: how the episode ended.
            sampling: parameters such as temperature.
            tags: labels, at most 64; each batch counts the trajectories of every value.
            metrics: finite numbers, at most 64; each batch has their means and extremes.
            awaits_reward: the reward, or some of its components, will be posted by `post_reward`,
                by any process. The group waits for it.

        Raises:
            InvalidTurnError: a value is wrong, or there is no turn; the trajectory is still open.
            TurnstreamError: a write of this trajectory failed, and why.
        """
        end = Receipt(self._sender.lock)
        with self._order:
            lane = self._opened_lane()
            self._sender.put(
                lambda: self._state.seal(
                    lane,
                    end,
                    reward=reward,
                    reward_components=reward_components,
                    status=status,
                    sampling=sampling,
                    tags=tags,
                    metrics=metrics,
                    awaits_reward=awaits_reward,
                )
            )
        end.result()

    def abandon(self, reason: str) -> Receipt:
        """Give the trajectory up: none of it is trained. Returns before the store has answered.

        Raises:
            RejectedError: the trajectory has ended.
        """
        with self._order:
            return self._abandon(reason)

    def _opened_lane(self) -> Lane:
        self._state.require_open()
        if self._state.lane is None:
            opened = Receipt(self._sender.lock)
            self._state.lane = self._sender.put(lambda: self._state.ask_leave(opened))
            try:
                opened.result()
            except BaseException as error:
                self._abandon(writers.reason_of(error))
                raise
        return self._state.lane

    def _abandon(self, reason: str) -> Receipt:
        end = Receipt(self._sender.lock)
        self._sender.put(lambda: self._state.abandon(reason, end))
        return end
