"""Generators: episodes written by the real publisher, several at a time."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from simulator.processes import Process
from simulator.shared_state import URL, SharedState
from turnstream.errors import (
    EndOfRunError,
    NotReadyError,
    PromptsExhaustedError,
    RejectedError,
    TurnstreamError,
    UnavailableError,
)
from turnstream.generator import AsyncPublisher
from turnstream.generator.api.trajectory_writers import AsyncTrajectoryWriter
from turnstream.generator.outbox.outbox import Outbox
from turnstream.store.client import keys
from turnstream.types import TrajectoryKey

REWARDS = (0.0, 0.5, 1.0)
_RESTRAINT = 0.8
"""Share of useless requests that are left out, because a refusal costs more than most acts."""


async def generator(process: Process, shared: SharedState) -> None:
    publisher = AsyncPublisher(
        URL, shared.run, writer=process.name, timeout_s=20.0, admission_timeout_s=30.0
    )
    shared.publishers.append((process, publisher))
    rng = process.world.rng
    is_given_tasks = bool(shared.num_prompts) and rng.random() < 0.8
    num_workers = rng.randint(1, shared.most_episodes)
    workers = [_work(process, shared, publisher, is_given_tasks) for _ in range(num_workers)]
    await asyncio.gather(*workers)


def have_found_out(shared: SharedState) -> bool:
    """Whether every living publisher has met the store as it is now, and told it all again.

    Once one has, it need not be asked again, however much it writes from then on.
    """
    acknowledged = shared.history.acknowledged
    shared.publishers = [
        (process, publisher)
        for process, publisher in shared.publishers
        if not (process.is_over or _has_found_out(process, publisher._outbox, acknowledged))
    ]
    return not shared.publishers


def _has_found_out(process: Process, outbox: Outbox, acknowledged: set[str]) -> bool:
    queues, sent = outbox._queues, outbox._round
    if queues.has_calls or not (sent is None or sent.is_heartbeat):
        return False
    waiting = [keys.trajectory_id(lane.key) for each in queues.waiting for lane in each.lanes]
    if not acknowledged.isdisjoint(waiting):
        return False  # a group without admission may only wait if it was never open
    has_met = outbox._incarnation == process.world.store.run_id
    return outbox.run_calls.is_settled and (has_met or outbox._resend_buffer.is_settled)


async def _work(
    process: Process, shared: SharedState, publisher: AsyncPublisher, is_given_tasks: bool
) -> None:
    rng = process.world.rng
    while not (shared.is_ended and shared.is_closed_for_good):
        acts = _ACTS if not shared.is_closing else _LAST_ACTS
        act = rng.choice(acts)
        if is_given_tasks and act in (_refill, _whole_group):  # it takes refills in one way
            act = _task
        if not _is_of_use(act, process, shared) and rng.random() < _RESTRAINT:
            await asyncio.sleep(rng.random() * 0.4)
            continue
        try:
            await act(process, shared, publisher)
        except (
            *(RejectedError, UnavailableError, NotReadyError),
            *(EndOfRunError, PromptsExhaustedError),
        ) as error:
            shared.history.refused(error)
        await asyncio.sleep(rng.random() * 0.4)


def _is_of_use(act: Any, process: Process, shared: SharedState) -> bool:
    store, names = process.world.store, keys.run_keys(shared.run)
    if act is _refill:
        return names.refills.encode() in store.values
    if act is _take_over:
        leases: Any = store.values.get(names.leases.encode())
        return leases is not None and leases.order[0][0] <= store.now_ms
    return True


async def _whole_group(process: Process, shared: SharedState, publisher: AsyncPublisher) -> None:
    if shared.num_begun >= shared.max_groups:
        return
    name, num_samples, num_needed = _new_group(process, shared)
    _begin_all(process, shared, [TrajectoryKey(name, sample) for sample in range(num_samples)])
    async with publisher.group(name, num_samples, num_needed=num_needed) as group:
        for sample in range(num_samples):
            if process.world.rng.random() < 0.8:
                await _tolerantly(process, shared, group.trajectory(sample))


async def _evaluation(process: Process, shared: SharedState, publisher: AsyncPublisher) -> None:
    rng = process.world.rng
    if shared.num_evals >= shared.max_evals:
        return
    shared.num_evals += 1
    name, num_samples = f"e{shared.num_evals}", rng.choice((1, 2, 3))
    _begin_all(process, shared, [TrajectoryKey(name, sample) for sample in range(num_samples)])
    async with publisher.group(name, num_samples, purpose="eval") as group:
        for sample in range(num_samples):
            if rng.random() < 0.9:
                await _tolerantly(process, shared, group.trajectory(sample))


async def _task(process: Process, shared: SharedState, publisher: AsyncPublisher) -> None:
    task = await publisher.next_task(0.3)
    for each in task.trajectories:
        shared.history.wrote(each.key, process.name)  # no other process may write it now
    known = {each.key for each in task.trajectories} & (process.begun - process.given_up)
    if known:
        by_name = all(key.attempt and ("refill", key) not in process.begun for key in known)
        if "cut" not in process.world.counts and not by_name:
            process.world.blame(f"{process.name} is given the task {task.group_id} twice")
    _begin_all(process, shared, [trajectory.key for trajectory in task.trajectories])
    process.begun.update(("refill", each.key) for each in task.trajectories)
    process.given_up.difference_update(each.key for each in task.trajectories)
    async with task:
        for trajectory in task.trajectories:
            await _tolerantly(process, shared, trajectory)


def _begin_all(process: Process, shared: SharedState, begun: list[TrajectoryKey]) -> None:
    process.begun.update(begun)
    for key in begun:
        shared.history.wrote(key, process.name)


async def _tolerantly(process: Process, shared: SharedState, writer: AsyncTrajectoryWriter) -> None:
    try:
        await _episode(process, shared, writer)
    except TurnstreamError as error:
        shared.history.refused(error)


async def _shared_group(process: Process, shared: SharedState, publisher: AsyncPublisher) -> None:
    rng = process.world.rng
    if rng.random() < 0.3 and shared.num_begun < shared.max_groups:
        shared.history.groups.append(_new_group(process, shared))
    if shared.history.groups:
        attempt = 0 if rng.random() < 0.75 else 1
        await _join(process, shared, publisher, shared.history.groups[-4:], attempt=attempt)


async def _join_any(process: Process, shared: SharedState, publisher: AsyncPublisher) -> None:
    """Open a member that is not yet open, of a group that several generators share."""
    if shared.history.groups:
        await _join(process, shared, publisher, shared.history.groups, attempt=0)


async def _join(
    process: Process,
    shared: SharedState,
    publisher: AsyncPublisher,
    groups: list[tuple[str, int, int]],
    *,
    attempt: int,
) -> None:
    name, num_samples, num_needed = process.world.rng.choice(groups)
    sample = process.world.rng.randrange(num_samples)
    key = TrajectoryKey(name, sample, attempt)
    if key in process.begun:
        return  # to open it again would be to write it twice
    process.begun.add(key)
    writer = publisher.trajectory(
        name,
        sample,
        num_samples=num_samples,
        num_needed=num_needed,
        attempt=attempt,
    )
    await _episode(process, shared, writer)


def _new_group(process: Process, shared: SharedState) -> tuple[str, int, int]:
    rng = process.world.rng
    shared.num_begun += 1
    num_samples = rng.choice((1, 2, 2, 3))
    return f"g{shared.num_begun}", num_samples, rng.randint(1, num_samples)


async def _refill(process: Process, shared: SharedState, publisher: AsyncPublisher) -> None:
    refill = await publisher.next_refill(0.3)
    if ("refill", refill.key) in process.begun:
        process.world.blame(f"{process.name} is given the refill {refill.key} twice")
    process.begun.add(("refill", refill.key))
    if refill.key in process.begun:
        return  # it was opened directly at the same time
    process.begun.add(refill.key)
    await _episode(process, shared, publisher.refill_trajectory(refill))


async def _take_over(process: Process, shared: SharedState, publisher: AsyncPublisher) -> None:
    rng = process.world.rng
    if rng.random() < 0.3 and shared.history.groups:  # at random: most writers live
        group_id, num_samples, _ = rng.choice(shared.history.groups)
        key = TrajectoryKey(group_id, rng.randrange(num_samples))
    elif lapsed := await publisher.lapsed():
        key = rng.choice(lapsed).key
    else:
        return
    if key in process.begun:
        return  # its own: a second writer would write it twice
    process.begun.add(key)
    before = _holder(process, shared, key)
    shared.history.wrote(key, process.name)  # it may be given to it, and the answer be lost
    try:
        writer = await publisher.adopt(key.group_id, key.sample, key.attempt)
    except TurnstreamError:
        process.begun.discard(key)
        raise
    epoch, name = before
    lane = writer._lane
    if lane is not None and lane.epoch == epoch + 1 and process.world.must_keep_leases(name):
        process.world.blame(f"{name} runs, and lost {keys.trajectory_id(key)} to {process.name}")
    await _episode(process, shared, writer)


def _holder(process: Process, shared: SharedState, key: TrajectoryKey) -> tuple[int, str]:
    ledger: Any = process.world.store.values.get(keys.run_keys(shared.run).ledger.encode(), {})
    state, _, rest = ledger.get(keys.trajectory_id(key).encode(), b"").decode().partition(":")
    if state != "open":
        return -1, ""
    epoch, _, writer = rest.partition(":")
    return int(epoch), writer


async def _post_reward(process: Process, shared: SharedState, publisher: AsyncPublisher) -> None:
    rng, awaiting = process.world.rng, shared.history.awaiting
    if awaiting:
        key = rng.choice(awaiting)
        _, reward = shared.history.rewarded.get(key, (0.0, rng.choice(REWARDS)))
        await publisher.post_reward(key, reward)
        shared.history.rewarded[key] = process.world.now_s, reward
        if key in awaiting:
            awaiting.remove(key)


_ACTS = (
    *(_whole_group, _whole_group, _shared_group, _shared_group, _shared_group),
    *(_refill, _refill, _take_over, _take_over, _post_reward, _evaluation),
)
_LAST_ACTS = (_refill, _take_over, _post_reward, _join_any)


async def _episode(process: Process, shared: SharedState, writer: AsyncTrajectoryWriter) -> None:
    rng = process.world.rng
    shared.history.wrote(writer.key, process.name)
    tokens = [
        token for turn in writer.turns[-1:] for token in (*turn.prompt_ids, *turn.response_ids)
    ]
    for _ in range(rng.choice((1, 1, 2, 3))):
        prompt, response = [*tokens, *shared.tokens(1)], shared.tokens(2)
        receipt = await writer.append(
            prompt, response, logprobs=[-1.0, -2.0], policy_version=shared.history.newest_version
        )
        tokens = [*prompt, *response]
        if rng.random() < 0.3:
            await receipt
        if rng.random() < 0.4:
            await asyncio.sleep(rng.random() * 0.3)
    chance = rng.random()
    if chance < 0.06:
        writer.abandon("chance")
        process.given_up.add(writer.key)
        return
    if chance < 0.25 and not shared.is_closing:
        await asyncio.sleep(rng.random() * 2 * shared.in_force.lease_s)
    await _seal(shared, writer, rng)


async def _seal(shared: SharedState, writer: AsyncTrajectoryWriter, rng: random.Random) -> None:
    history, key = shared.history, writer.key
    name = keys.trajectory_id(key)
    crcs = tuple(writer._draft._crcs) if writer._draft else ()
    history.said.setdefault(name, set()).add(crcs)
    is_eval = key.group_id.startswith("e") and not shared.in_force.reward_deadline_s
    awaits = rng.random() < 0.3 and not is_eval  # no run waits for its evaluations
    if awaits:
        history.awaiting.append(TrajectoryKey(*key))
    await writer.seal(None if awaits else rng.choice(REWARDS), awaits_reward=awaits)
    history.acknowledged.add(name)
