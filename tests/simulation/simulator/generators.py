"""Generators: episodes written by the real publisher, several at a time."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from simulator.life import URL, Life
from simulator.processes import Process
from turnstream.errors import (
    EndOfRunError,
    NotReadyError,
    PromptsExhaustedError,
    RejectedError,
    TurnstreamError,
    UnavailableError,
)
from turnstream.generator import AsyncPublisher
from turnstream.generator.api.async_publisher import AsyncTrajectoryWriter
from turnstream.generator.outbox.outbox import Outbox
from turnstream.store.client import keys
from turnstream.types import TrajectoryKey

REWARDS = (0.0, 0.5, 1.0)
_RESTRAINT = 0.8
"""Share of useless requests that are left out, because a refusal costs more than most acts."""


async def generator(process: Process, life: Life) -> None:
    """Several episodes at a time, by one publisher."""
    publisher = AsyncPublisher(
        URL, life.run, writer=process.name, timeout_s=20.0, admission_timeout_s=30.0
    )
    life.publishers.append((process, publisher))
    rng = process.world.rng
    is_given_tasks = bool(life.num_prompts) and rng.random() < 0.8
    num_workers = rng.randint(1, life.most_episodes)
    workers = [_work(process, life, publisher, is_given_tasks) for _ in range(num_workers)]
    await asyncio.gather(*workers)


def have_found_out(life: Life) -> bool:
    """Whether every living publisher has met the store as it is now, and told it all again.

    Once one has, it need not be asked again, however much it writes from then on.
    """
    acknowledged = life.history.acknowledged
    life.publishers = [
        (process, publisher)
        for process, publisher in life.publishers
        if not (process.is_over or _has_found_out(process, publisher._outbox, acknowledged))
    ]
    return not life.publishers


def _has_found_out(process: Process, outbox: Outbox, acknowledged: set[str]) -> bool:
    queues, sent = outbox._queues, outbox._round
    told = [each for each in (*queues._queues, queues._payload) if each is not queues.waiting]
    if any(told) or not (sent is None or sent.is_heartbeat):
        return False
    waiting = [keys.trajectory_id(lane.key) for each in queues.waiting for lane in each.lanes]
    if not acknowledged.isdisjoint(waiting):
        return False  # a group without admission may only wait if it was never open
    has_met = outbox._incarnation == process.world.store.run_id
    return outbox._reposts.is_empty and (has_met or outbox._resend_buffer.is_settled)


async def _work(
    process: Process, life: Life, publisher: AsyncPublisher, is_given_tasks: bool
) -> None:
    rng = process.world.rng
    while not (life.is_ended and life.is_closed_for_good):
        acts = _ACTS if not life.is_closing else _LAST_ACTS
        act = rng.choice(acts)
        if is_given_tasks and act in (_refill, _whole_group):  # it takes refills in one way
            act = _task
        if not _is_of_use(act, process, life) and rng.random() < _RESTRAINT:
            await asyncio.sleep(rng.random() * 0.4)
            continue
        try:
            await act(process, life, publisher)
        except (
            *(RejectedError, UnavailableError, NotReadyError),
            *(EndOfRunError, PromptsExhaustedError),
        ) as error:
            life.history.refused(error)
        await asyncio.sleep(rng.random() * 0.4)


def _is_of_use(act: Any, process: Process, life: Life) -> bool:
    """Whether the store has, at this moment, what an act asks for."""
    store, names = process.world.store, keys.run_keys(life.run)
    if act is _refill:
        return names.refills.encode() in store.values
    if act is _take_over:
        leases: Any = store.values.get(names.leases.encode())
        return leases is not None and leases.order[0][0] <= store.now_ms
    return True


async def _whole_group(process: Process, life: Life, publisher: AsyncPublisher) -> None:
    if life.num_begun >= life.max_groups:
        return
    name, num_samples, num_needed = _new_group(process, life)
    _begin_all(process, life, [TrajectoryKey(name, sample) for sample in range(num_samples)])
    async with publisher.group(name, num_samples, num_needed=num_needed) as group:
        for sample in range(num_samples):
            if process.world.rng.random() < 0.8:
                await _tolerantly(process, life, group.trajectory(sample))


async def _evaluation(process: Process, life: Life, publisher: AsyncPublisher) -> None:
    rng = process.world.rng
    if life.num_evals >= life.max_evals:
        return
    life.num_evals += 1
    name, num_samples = f"e{life.num_evals}", rng.choice((1, 2, 3))
    _begin_all(process, life, [TrajectoryKey(name, sample) for sample in range(num_samples)])
    async with publisher.group(name, num_samples, purpose="eval") as group:
        for sample in range(num_samples):
            if rng.random() < 0.9:
                await _tolerantly(process, life, group.trajectory(sample))


async def _task(process: Process, life: Life, publisher: AsyncPublisher) -> None:
    """Take a task of the run: a refill, or one of its prompts."""
    task = await publisher.next_task(0.3)
    for each in task.trajectories:
        life.history.wrote(each.key, process.name)  # no other process may write it now
    known = {each.key for each in task.trajectories} & (process.begun - process.given_up)
    if known:
        by_name = all(key.attempt and ("refill", key) not in process.begun for key in known)
        if "cut" not in process.world.counts and not by_name:
            process.world.blame(f"{process.name} is given the task {task.group_id} twice")
    _begin_all(process, life, [trajectory.key for trajectory in task.trajectories])
    process.begun.update(("refill", each.key) for each in task.trajectories)
    process.given_up.difference_update(each.key for each in task.trajectories)
    async with task:
        for trajectory in task.trajectories:
            await _tolerantly(process, life, trajectory)


def _begin_all(process: Process, life: Life, begun: list[TrajectoryKey]) -> None:
    """These are opened together, by one call."""
    process.begun.update(begun)
    for key in begun:
        life.history.wrote(key, process.name)


async def _tolerantly(process: Process, life: Life, writer: AsyncTrajectoryWriter) -> None:
    try:
        await _episode(process, life, writer)
    except TurnstreamError as error:
        life.history.refused(error)


async def _shared_group(process: Process, life: Life, publisher: AsyncPublisher) -> None:
    """A sample of a group that others write too."""
    rng = process.world.rng
    if rng.random() < 0.3 and life.num_begun < life.max_groups:
        life.history.groups.append(_new_group(process, life))
    if life.history.groups:
        attempt = 0 if rng.random() < 0.75 else 1
        await _join(process, life, publisher, life.history.groups[-4:], attempt=attempt)


async def _join_any(process: Process, life: Life, publisher: AsyncPublisher) -> None:
    """Open a member that is not yet open, of a group that several generators share."""
    if life.history.groups:
        await _join(process, life, publisher, life.history.groups, attempt=0)


async def _join(
    process: Process,
    life: Life,
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
    await _episode(process, life, writer)


def _new_group(process: Process, life: Life) -> tuple[str, int, int]:
    rng = process.world.rng
    life.num_begun += 1
    num_samples = rng.choice((1, 2, 2, 3))
    return f"g{life.num_begun}", num_samples, rng.randint(1, num_samples)


async def _refill(process: Process, life: Life, publisher: AsyncPublisher) -> None:
    refill = await publisher.next_refill(0.3)
    if ("refill", refill.key) in process.begun:
        process.world.blame(f"{process.name} is given the refill {refill.key} twice")
    process.begun.add(("refill", refill.key))
    if refill.key in process.begun:
        return  # it was opened directly at the same time
    process.begun.add(refill.key)
    await _episode(process, life, publisher.refill_trajectory(refill))


async def _take_over(process: Process, life: Life, publisher: AsyncPublisher) -> None:
    rng = process.world.rng
    if rng.random() < 0.3 and life.history.groups:  # at random: most writers live
        group_id, num_samples, _ = rng.choice(life.history.groups)
        key = TrajectoryKey(group_id, rng.randrange(num_samples))
    elif lapsed := await publisher.lapsed():
        key = rng.choice(lapsed).key
    else:
        return
    if key in process.begun:
        return  # its own: a second writer would write it twice
    process.begun.add(key)
    before = _holder(process, life, key)
    life.history.wrote(key, process.name)  # it may be given to it, and the answer be lost
    try:
        writer = await publisher.take_over(key.group_id, key.sample, key.attempt)
    except TurnstreamError:
        process.begun.discard(key)
        raise
    epoch, name = before
    lane = writer._lane
    if lane is not None and lane.epoch == epoch + 1 and process.world.must_keep_leases(name):
        process.world.blame(f"{name} lives, and lost {keys.trajectory_id(key)} to {process.name}")
    await _episode(process, life, writer)


def _holder(process: Process, life: Life, key: TrajectoryKey) -> tuple[int, str]:
    """The lease epoch of an open trajectory, and its writer."""
    ledger: Any = process.world.store.values.get(keys.run_keys(life.run).ledger.encode(), {})
    state, _, rest = ledger.get(keys.trajectory_id(key).encode(), b"").decode().partition(":")
    if state != "open":
        return -1, ""
    epoch, _, writer = rest.partition(":")
    return int(epoch), writer


async def _post_reward(process: Process, life: Life, publisher: AsyncPublisher) -> None:
    rng, awaiting = process.world.rng, life.history.awaiting
    if awaiting:
        key = rng.choice(awaiting)
        _, reward = life.history.rewarded.get(key, (0.0, rng.choice(REWARDS)))
        await publisher.post_reward(key, reward)
        life.history.rewarded[key] = process.world.now_s, reward
        if key in awaiting:
            awaiting.remove(key)


_ACTS = (
    *(_whole_group, _whole_group, _shared_group, _shared_group, _shared_group),
    *(_refill, _refill, _take_over, _take_over, _post_reward, _evaluation),
)
_LAST_ACTS = (_refill, _take_over, _post_reward, _join_any)


async def _episode(process: Process, life: Life, writer: AsyncTrajectoryWriter) -> None:
    rng = process.world.rng
    life.history.wrote(writer.key, process.name)
    tokens = [
        token for turn in writer.turns[-1:] for token in (*turn.prompt_ids, *turn.response_ids)
    ]
    for _ in range(rng.choice((1, 1, 2, 3))):
        prompt, response = [*tokens, *life.tokens(1)], life.tokens(2)
        receipt = await writer.append(
            prompt, response, logprobs=[-1.0, -2.0], policy_version=life.history.newest_version
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
    if chance < 0.25 and not life.is_closing:
        await asyncio.sleep(rng.random() * 2 * life.in_force.lease_s)
    await _seal(life, writer, rng)


async def _seal(life: Life, writer: AsyncTrajectoryWriter, rng: random.Random) -> None:
    history, key = life.history, writer.key
    name = keys.trajectory_id(key)
    crcs = tuple(writer._draft._crcs) if writer._draft else ()
    history.said.setdefault(name, set()).add(crcs)
    is_eval = key.group_id.startswith("e") and not life.in_force.reward_deadline_s
    awaits = rng.random() < 0.3 and not is_eval  # no run waits for its evaluations
    if awaits:
        history.awaiting.append(TrajectoryKey(*key))
    await writer.seal(None if awaits else rng.choice(REWARDS), awaits_reward=awaits)
    history.acknowledged.add(name)
