"""Clocks that jump, and versions that jump behind a recovery."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.machine import Machine
from harness.rig import ENDLESS, Rig, config
from testkit import group, ids
from turnstream.generator import Publisher, RewardOutcome, post_reward
from turnstream.store.client import keys
from turnstream.types import TrajectoryKey
from turnstream.worker.observer import ObserverStream

pytestmark = [pytest.mark.e2e, pytest.mark.grpc, pytest.mark.timeout(600)]

HOUR_S = 3600.0
LONG: dict[str, Any] = {
    "group_deadline_s": HOUR_S / 2,
    "reward_deadline_s": HOUR_S / 2,
    "takeover_s": 2 * HOUR_S,  # no lease ends on a busy machine
}


@pytest.mark.parametrize("jumps", [(HOUR_S, 0.0), (-HOUR_S, 0.0)], ids=["ahead", "back"])
def test_clock_that_jumps_by_an_hour_ends_no_lease(
    start_rig: Callable[..., Rig], tmp_path: Path, jumps: tuple[float, ...]
) -> None:
    # Fault 24: the server's clock, by which all leases are. One trajectory is open all the time,
    # and its writer has half a lease until it must be heard.
    machine = Machine(tmp_path)
    rig = start_rig(config=config(lease_s=20.0), binary=machine.binary)
    before: Any = rig.client.time()
    rig.start_batcher()
    end = rig.folder / "go on"
    rig.start_generator("open", groups=1, hang_in="open-0/0/0", hang_until=end)
    rig.start_generator(groups=ENDLESS, pause_s=0.1)
    rig.start_ranks(1, checkpoint_every=1)
    rig.wait_for_lines("stepped")
    rig.wait_for_lines("hanging")

    for wrong_by_s in jumps:
        stepped = rig.count("stepped")
        _jump(rig, machine, before, wrong_by_s)
        _wait_for_timekeeper(rig)
        rig.wait_for_lines("stepped", stepped + 2)

    end.touch()
    rig.close_run()
    leader: Any = rig.client.hgetall(keys.run_keys(rig.run).leader)
    assert leader[b"epoch"] == b"1"
    rig.drain()


@pytest.mark.parametrize("jumps", [(HOUR_S, 0.0), (-HOUR_S, 0.0)], ids=["ahead", "back"])
def test_clock_that_jumps_by_an_hour_ends_no_deadline_and_no_observer(
    start_rig: Callable[..., Rig], tmp_path: Path, jumps: tuple[float, ...]
) -> None:
    # Fault 24: a group and a reward of half an hour each, and an observer of ten minutes. A
    # leader looks at those every five seconds, and one that begins at once.
    machine = Machine(tmp_path)
    rig = start_rig(
        config=config(batch_groups=1, mini_batch_groups=1, lease_s=5.0, **LONG),
        binary=machine.binary,
    )
    before: Any = rig.client.time()
    batcher = rig.start_batcher()
    with (
        Publisher(rig.store_url, rig.run) as publisher,
        ObserverStream(rig.address(), rig.run, "audit", first_step=1, expiry_s=600) as observer,
    ):
        hangs, waits = (publisher.trajectory(name, 0, num_samples=1) for name in ("hangs", "waits"))
        for episode in (hangs, waits):
            episode.append(ids("ab"), ids("c"), logprobs=[-1.0], policy_version=0)
        waits.seal(awaits_reward=True)
        publisher.flush(10)

        for step, wrong_by_s in enumerate(jumps, start=1):
            _jump(rig, machine, before, wrong_by_s)
            _wait_for_timekeeper(rig)
            if wrong_by_s == max(jumps):  # it has gone ahead
                batcher.kill()
                rig.start_batcher()
                for _ in range(2):
                    _wait_for_timekeeper(rig)
            publisher.publish(group(f"g{step}")).result(10)
            assert next(observer).info.step == step
            observer.seen()

        counts = rig.counts()
        assert counts == {"accepted": 6, "open": 1, "awaiting_reward": 1, "planned": 4}
        hangs.append(ids("abcd"), ids("e"), logprobs=[-1.0], policy_version=0).result(10)
        outcome = post_reward(rig.client, rig.run, TrajectoryKey("waits", 0), 1.0)
        assert outcome is RewardOutcome.POSTED
        hangs.seal(1.0)


def _wait_for_timekeeper(rig: Rig) -> None:
    def read_ms() -> int:
        at_ms: Any = rig.client.hget(keys.run_keys(rig.run).clock, "at_ms")
        return int(at_ms or 0)

    now: Any = rig.client.time()
    rig.wait(lambda: abs(read_ms() / 1000 - now[0]) < HOUR_S / 2, "the new time")
    first_ms = read_ms()
    rig.wait(lambda: read_ms() != first_ms, "the time after it")


def _jump(rig: Rig, machine: Machine, before: tuple[int, int], wrong_by_s: float) -> None:
    def has_jumped() -> bool:
        now: Any = rig.client.time()
        return abs(now[0] - before[0] - wrong_by_s) < HOUR_S / 2

    machine.set_clock(wrong_by_s=wrong_by_s)
    rig.wait(has_jumped, "the jump")


def test_clocks_of_waiting_processes_may_jump_by_an_hour(rig: Rig, tmp_path: Path) -> None:
    """Takes more than 5 s: leases end while clocks jump."""
    # Fault 24: the clocks of batcher, generator and rank are two hours apart, and then swapped.
    machine = Machine(tmp_path)
    processes = ("batcher", "generator", "rank")
    rig.environment = machine.environment("batcher")
    rig.start_batcher()
    rig.environment = machine.environment("generator")
    rig.start_generator(groups=ENDLESS, pause_s=0.1)
    rig.environment = machine.environment("rank")
    rig.start_ranks(1, checkpoint_every=1)
    rig.wait_for_lines("stepped")

    for wrong_by_s in ((-HOUR_S, HOUR_S, HOUR_S), (HOUR_S, -HOUR_S, -HOUR_S)):
        rig.stop_store()  # everybody tries again until a deadline of its own
        for process, jump_s in zip(processes, wrong_by_s, strict=True):
            machine.set_clock(wrong_by_s=jump_s, of=process)
        rig.wait(lambda: all(map(machine.has_seen_clock, processes)), "a look at the clocks")
        rig.wait_for_lines("alive", rig.count("alive") + 3)
        rig.server.restart()
        rig.wait_for_lines("stepped", rig.count("stepped") + 2)

    rig.environment = {}
    rig.close_run()
    rig.drain()
    assert rig.counts() == dict.fromkeys(("accepted", "committed"), rig.count("sealed"))


def test_age_of_tokens_is_restored_after_a_version_jump(
    start_rig: Callable[..., Rig],
) -> None:
    # Fault 24, AReaL #1388: age is counted in steps, whatever numbers the versions have. Behind the
    # way back to step 1, what the weights of the lost step 3 sampled is as old as step 1: it may be
    # trained in step 4, and not in step 6.
    small = config(
        batch_groups=2,
        mini_batch_groups=1,
        max_staleness=2,
        max_planned_ahead=0,
        max_age_policy="drop",
    )
    rig = start_rig(config=small)
    rig.start_batcher()
    rig.join(rig.start_generator("first", groups=6, version=0))
    rig.join(rig.start_ranks(1, checkpoint_every=1, max_steps=3))
    rig.join(rig.start_ranks(1, from_step=1, version_jump=1000, checkpoint_every=1, max_steps=2))

    for writer, version in (("lost", 3), ("new", 1004)):
        rig.join(rig.start_generator(writer, groups=2, version=version))
    for writer, version in (("late", 3), ("old", 0)):
        rig.start_generator(writer, groups=2, version=version)
        rig.excused |= {f"{writer}-{group}/{n}/0" for group in range(2) for n in range(2)}
    rig.drain(from_step=2)

    step_of = {line["version"]: line["step"] for line in rig.history().of("announced")}
    assert {step_of[version] for version in (3, 1004)} == {3, 2}
    assert rig.counts() == {"accepted": 28, "committed": 20, "expired": 8}
    assert rig.excused.isdisjoint(rig.trained())
