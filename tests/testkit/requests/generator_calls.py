"""Every call of a generator and of an operator, in a fixed order, for comparisons of transports."""

from __future__ import annotations

import contextlib
from typing import Any

import turnstream
from testkit.letters import ids
from testkit.turns import group
from testkit.waiting import wait_until
from turnstream.errors import ConflictError, NotReadyError
from turnstream.generator import Prompt, Publisher
from turnstream.types import TrajectoryKey

SETTINGS: dict[str, Any] = {"batch_groups": 8, "lease_s": 0.5, "max_samples": 4}


def write_everything(run: turnstream.Run) -> None:
    """Write groups in every way of a publisher, task and reward; each write is acknowledged."""
    with run.publisher("first") as publisher:
        _write_groups(publisher)
        _write_tasks(run, publisher)
    _adopt(run)


def _write_groups(publisher: Publisher) -> None:
    with publisher.group("turns", 2, prompt_uid="prompt") as members:
        for sample, trajectory in enumerate(members):
            trajectory.append(ids("ab"), ids("CD"), logprobs=[-0.5, -0.25], policy_version=0)
            trajectory.append(ids("abCDe"), ids("F"), rewards=[0.5], policy_version=1)
            trajectory.seal(float(sample), metrics={"length": 3}, tags={"kind": "maze"})
    publisher.publish(group("whole")).result()
    with publisher.trajectory("awaited", 0, num_samples=1) as late:
        late.append(ids("a"), ids("B"))
        late.seal(awaits_reward=True)
    publisher.post_reward(TrajectoryKey("awaited", 0), 0.5, reward_components={"style": 1.0})
    given_up = publisher.trajectory("given up", 0, num_samples=1)
    given_up.append(ids("a"), ids("B")).result()
    given_up.abandon("too long").result()
    with publisher.group("scored", 1, purpose="eval") as members:
        for trajectory in members:
            trajectory.append(ids("a"), ids("B"))
            trajectory.seal(1.0)
    with publisher.trajectory("large", 0, num_samples=1) as large:
        for number in range(4):  # beyond its first reservation
            prompt = ids("a" * 4_000 * (number + 1))
            large.append(prompt, ids("B" * 2_000), logprobs=[-0.5] * 2_000).result()
        large.seal(1.0)


def _write_tasks(run: turnstream.Run, publisher: Publisher) -> None:
    run.add_prompts([Prompt(prompt_uid="task 1", payload=b"What?", num_samples=2)])
    with publisher.next_task(10) as task:
        for trajectory in task.trajectories:
            trajectory.append(ids("q"), ids("A"))
            trajectory.seal(1.0)
    with contextlib.suppress(NotReadyError):
        publisher.next_task(0.1)
    with contextlib.suppress(NotReadyError):
        publisher.next_refill(0.1)


def _adopt(run: turnstream.Run) -> None:
    """Leave a trajectory open, and continue it with another publisher."""
    key = TrajectoryKey("left", 0)
    left = run.publisher("second")
    left.trajectory("left", 0, num_samples=1).append(ids("a"), ids("B")).result()
    with run.publisher("second") as same, contextlib.suppress(ConflictError):  # another content
        same.trajectory("left", 0, num_samples=1).append(ids("c"), ids("D")).result()
        same.flush()
    left.close()
    with run.publisher("third") as publisher:
        with contextlib.suppress(ConflictError):  # its lease has not ended
            publisher.adopt(*key)
        wait_until(
            lambda: key in [each.key for each in publisher.lapsed()], describe="the end of a lease"
        )
        adopted = publisher.adopt(*key)
        adopted.append(ids("aBc"), ids("D")).result()
        adopted.seal(1.0)
        with publisher.group("left", 1, exist_ok=True) as members:
            assert list(members) == []
        with contextlib.suppress(ConflictError):
            publisher.trajectory("turns", 0, num_samples=2).append(ids("a"), ids("B")).result()


def operate(run: turnstream.Run) -> None:
    """Make the calls of an operator."""
    assert run.pause("for lunch")
    assert run.resume()
    assert run.credit().num_groups > 0
    assert run.revise(from_step=5, batch_groups=16, mini_batch_groups=16) == 2
    with contextlib.suppress(NotReadyError):
        run.wait_for_version(timeout_s=0.1)
    run.close("the end")
    assert run.reopen()
    with run.publisher("last") as publisher:
        publisher.close_run("the end")
