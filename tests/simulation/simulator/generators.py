"""Generators: episodes written by the real publisher, several at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from simulator.processes import Process
from simulator.shared_state import URL, SharedState
from turnstream.batching.merge.left_out import left_out
from turnstream.errors import (
    EndOfRunError,
    InvalidTurnError,
    NotReadyError,
    PromptsExhaustedError,
    RejectedError,
    TurnstreamError,
    UnavailableError,
)
from turnstream.generator import AsyncPublisher
from turnstream.generator.api.trajectory_writers import AsyncTrajectoryWriter
from turnstream.store.client import keys
from turnstream.types import Siblings, Status, TrajectoryKey

REWARDS = (0.0, 0.5, 1.0)
_STATUSES = (*[Status.COMPLETED] * 8, Status.TRUNCATED, Status.ERROR)
_RESTRAINT = 0.8
"""Share of useless requests that are left out, because a refusal costs more than most acts."""


async def generator(process: Process, shared: SharedState) -> None:
    """Run a generator until the run is finished."""
    own = Generator(process, shared)
    shared.generators.append(own)
    rng = process.world.rng
    takes_tasks = bool(shared.num_prompts) and rng.random() < 0.8
    num_workers = rng.randint(1, shared.most_episodes)
    await asyncio.gather(*[own.work(takes_tasks=takes_tasks) for _ in range(num_workers)])


class Generator:
    """The episodes of one process.

    Attributes:
        started: trajectories that it started; it neither starts them again nor adopts them.
        abandoned: started trajectories that it abandoned; a store that lost this may assign them
            again.
        adopting: started trajectories whose adoption is not answered. A task whose answer was lost
            has lapsed: it may be assigned again and adopted at the same time.
    """

    def __init__(self, process: Process, shared: SharedState) -> None:
        self.process = process
        self._shared = shared
        self._history = shared.history
        self._world, self._rng = process.world, process.world.rng
        self._publisher = AsyncPublisher(
            URL, shared.run, writer=process.name, timeout_s=20.0, admission_timeout_s=30.0
        )
        self.started: set[TrajectoryKey] = set()
        self.refills: set[TrajectoryKey] = set()
        self.abandoned: set[TrajectoryKey] = set()
        self.adopting: set[TrajectoryKey] = set()

    def has_resent(self) -> bool:
        """Return whether the publisher knows the store's present start and resent all lost writes.

        Once it has, later writes do not matter.
        """
        outbox = self._publisher._outbox
        send_queues, sent = outbox._queues, outbox._round
        if send_queues.has_calls or not (sent is None or sent.is_heartbeat):
            return False
        waiting = [
            keys.trajectory_id(queue.key) for each in send_queues.waiting for queue in each.queues
        ]
        if not self._history.acknowledged.isdisjoint(waiting):
            return False  # a group without admission may only wait if it was never open
        knows_start = outbox._process == self._world.store.run_id.decode()
        return outbox.run_calls.is_settled and (knows_start or outbox._resend_buffer.is_settled)

    async def work(self, *, takes_tasks: bool) -> None:
        """Do one act after another until the run is finished."""
        shared, rng = self._shared, self._rng
        while not (shared.is_ended and shared.is_closed_for_good):
            act = rng.choice(_LAST_ACTS if shared.is_closing else _ACTS)
            if takes_tasks and act in (Generator._refill, Generator._whole_group):
                act = Generator._task  # which includes refills
            if self._is_of_use(act) or rng.random() >= _RESTRAINT:
                try:
                    await act(self)
                except (
                    *(RejectedError, UnavailableError, NotReadyError),
                    *(EndOfRunError, PromptsExhaustedError),
                ) as error:
                    self._history.refused(error)
            await asyncio.sleep(rng.random() * 0.4)

    def _is_of_use(self, act: Any) -> bool:
        store, names = self._world.store, keys.run_keys(self._shared.run)
        if act is Generator._refill:
            return names.refills.encode() in store.values
        if act is Generator._adopt:
            leases: Any = store.values.get(names.leases.encode())
            return leases is not None and leases.order[0][0] <= store.now_ms
        return True

    async def _whole_group(self) -> None:
        if self._shared.num_groups < self._shared.max_groups:
            name, num_samples, num_needed = self._new_group()
            await self._write_group(name, num_samples, share=0.8, num_needed=num_needed)

    async def _evaluation(self) -> None:
        if self._shared.num_evals < self._shared.max_evals:
            self._shared.num_evals += 1
            name, num_samples = f"e{self._shared.num_evals}", self._rng.choice((1, 2, 3))
            await self._write_group(name, num_samples, share=0.9, purpose="eval")

    async def _write_group(
        self, name: str, num_samples: int, *, share: float, **options: Any
    ) -> None:
        self._start_all([TrajectoryKey(name, sample) for sample in range(num_samples)])
        async with self._publisher.group(name, num_samples, **options) as group:
            for sample in range(num_samples):
                if self._rng.random() < share:
                    await self._tolerantly(group.trajectory(sample))

    async def _task(self) -> None:
        task = await self._publisher.next_task(0.3)
        assigned = [trajectory.key for trajectory in task.trajectories]
        for key in assigned:
            self._history.wrote(key, self.process.name)  # no other process may write it now
        known = {*assigned} & (self.started - self.abandoned - self.adopting)
        are_refills = all(key.attempt and key not in self.refills for key in known)
        if known and not are_refills and "cut" not in self._world.counts:
            self._world.fail(f"{self.process.name} is given the task {task.group_id} twice")
        self._start_all(assigned)
        self.refills.update(assigned)
        self.abandoned.difference_update(assigned)
        async with task:
            for trajectory in task.trajectories:
                await self._tolerantly(trajectory)

    def _start_all(self, started: list[TrajectoryKey]) -> None:
        self.started.update(started)
        for key in started:
            self._history.wrote(key, self.process.name)

    async def _tolerantly(self, writer: AsyncTrajectoryWriter) -> None:
        try:
            await self._episode(writer)
        except TurnstreamError as error:
            self._history.refused(error)

    async def _shared_group(self) -> None:
        if self._rng.random() < 0.3 and self._shared.num_groups < self._shared.max_groups:
            self._history.groups.append(self._new_group())
        if self._history.groups:
            attempt = 0 if self._rng.random() < 0.75 else 1
            await self._join(self._history.groups[-4:], attempt=attempt)

    async def _join_any(self) -> None:
        """Open a member that is not yet open, of a group that several generators share."""
        if self._history.groups:
            await self._join(self._history.groups, attempt=0)

    async def _join(self, groups: list[tuple[str, int, int]], *, attempt: int) -> None:
        name, num_samples, num_needed = self._rng.choice(groups)
        key = TrajectoryKey(name, self._rng.randrange(num_samples), attempt)
        if key in self.started:
            return  # to open it again would be to write it twice
        self.started.add(key)
        writer = self._publisher.trajectory(
            name, key.sample, num_samples=num_samples, num_needed=num_needed, attempt=attempt
        )
        await self._episode(writer)

    def _new_group(self) -> tuple[str, int, int]:
        self._shared.num_groups += 1
        num_samples = self._rng.choice((1, 2, 2, 3))
        return f"g{self._shared.num_groups}", num_samples, self._rng.randint(1, num_samples)

    async def _refill(self) -> None:
        refill = await self._publisher.next_refill(0.3)
        if refill.key in self.refills:
            self._world.fail(f"{self.process.name} is given the refill {refill.key} twice")
        self.refills.add(refill.key)
        if refill.key in self.started:
            return  # it was opened directly at the same time
        self.started.add(refill.key)
        try:
            await self._episode(self._publisher.refill_trajectory(refill))
        except InvalidTurnError:
            if "cut" not in self._world.counts:  # else the store has lost the attempts before it
                raise

    async def _adopt(self) -> None:
        rng, own_name = self._rng, self.process.name
        if rng.random() < 0.3 and self._history.groups:  # at random: most writers live
            group_id, num_samples, _ = rng.choice(self._history.groups)
            key = TrajectoryKey(group_id, rng.randrange(num_samples))
        elif lapsed := await self._publisher.lapsed():
            key = rng.choice(lapsed).key
        else:
            return
        if key in self.started:
            return  # its own: a second writer would write it twice
        self.started.add(key)
        epoch, writer_name = self._current_writer(key)
        self._history.wrote(key, own_name)  # the store may adopt it, and the reply be lost
        self.adopting.add(key)
        try:
            writer = await self._publisher.adopt(key.group_id, key.sample, key.attempt)
        except TurnstreamError:
            self.started.discard(key)
            raise
        finally:
            self.adopting.discard(key)
        queue = writer._queue
        is_next = queue is not None and queue.epoch == epoch + 1
        if is_next and self._world.must_keep_leases(writer_name):
            self._world.fail(f"{writer_name} runs, and lost {key.trajectory_id} to {own_name}")
        await self._episode(writer)

    def _current_writer(self, key: TrajectoryKey) -> tuple[int, str]:
        names = keys.run_keys(self._shared.run)
        ledger: Any = self._world.store.values.get(names.ledger.encode(), {})
        entry = ledger.get(key.trajectory_id.encode(), b"").decode()
        state, _, rest = entry.partition(":")
        if state != "open":
            return -1, ""
        epoch, _, writer = rest.partition(":")
        return int(epoch), writer

    async def _post_reward(self) -> None:
        awaiting, rewarded = self._history.awaiting, self._history.rewarded
        if awaiting:
            key = self._rng.choice(awaiting)
            _, reward = rewarded.get(key, (0.0, self._rng.choice(REWARDS)))
            await self._publisher.post_reward(key, reward)
            rewarded[key] = self._world.now_s, reward
            if key in awaiting:
                awaiting.remove(key)

    async def _episode(self, writer: AsyncTrajectoryWriter) -> None:
        shared, rng = self._shared, self._rng
        self._history.wrote(writer.key, self.process.name)
        tokens = [t for turn in writer.turns[-1:] for t in (*turn.prompt_ids, *turn.response_ids)]
        for _ in range(rng.choice((1, 1, 2, 3))):
            prompt, response = [*tokens, *shared.tokens(1)], shared.tokens(2)
            version = self._history.newest_version
            if rng.random() < 0.2:  # an answer that is not used
                await writer.append(
                    prompt, shared.tokens(2), logprobs=[-1.0, -2.0], policy_version=version
                )
            receipt = await writer.append(
                prompt, response, logprobs=[-1.0, -2.0], policy_version=version
            )
            tokens = [*prompt, *response]
            if rng.random() < 0.3:
                await receipt
            if rng.random() < 0.4:
                await asyncio.sleep(rng.random() * 0.3)
        chance = rng.random()
        if chance < 0.06:
            writer.abandon("chance")
            self.abandoned.add(writer.key)
            return
        if chance < 0.25 and not shared.is_closing:
            await asyncio.sleep(rng.random() * 2 * shared.in_force.lease_s)
        await self._seal(writer)

    async def _seal(self, writer: AsyncTrajectoryWriter) -> None:
        history, key = self._history, writer.key
        turns = writer._draft._turns if writer._draft else []
        crcs = tuple([turn.payload_crc for turn in turns])
        siblings: Siblings = self._rng.choice(("train", "mask"))
        unused = left_out([turn.shape for turn in turns], siblings=siblings)
        history.sealed_turns.setdefault(key.trajectory_id, set()).add((crcs, unused))
        is_eval = key.group_id.startswith("e") and not self._shared.in_force.reward_deadline_s
        awaits = self._rng.random() < 0.3 and not is_eval  # no run waits for its evaluations
        if awaits:
            history.awaiting.append(TrajectoryKey(*key))
        await writer.seal(
            None if awaits else self._rng.choice(REWARDS),
            status=self._rng.choice(_STATUSES),
            metrics={"score": self._rng.random()},
            awaits_reward=awaits,
            siblings=siblings,
        )
        history.acknowledged.add(key.trajectory_id)


_ACTS = (
    *[Generator._whole_group] * 2,
    *[Generator._shared_group] * 3,
    *[Generator._refill] * 2,
    *[Generator._adopt] * 2,
    *(Generator._post_reward, Generator._evaluation),
)
_LAST_ACTS = (
    *(Generator._refill, Generator._adopt),
    *(Generator._post_reward, Generator._join_any),
)
