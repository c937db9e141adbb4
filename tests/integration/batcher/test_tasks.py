"""Runs that carry their prompts: real generators that die with tasks in their hands, end to end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.tasks import Prompt, PromptCounts, add_prompts, read_prompt_counts
from turnstream_server.bus.queries.ledger import read_ledger

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

LEASE_S = 2.0
TAKEOVER_S = 600.0
"""For so long a generator that lives may stand still and lose nothing."""

UIDS = ("p0", "p1", "p2", "p3", "p4")

# Takes two tasks, writes a turn of each, prints their prompts, and waits to be killed.
DOOMED = """
import sys
from turnstream.generator import Publisher
from testkit import ids

url, run = sys.argv[1:]
with Publisher(url, run) as publisher:
    held = [publisher.next_task(30) for _ in range(2)]
    for task in held:
        task.trajectories[0].append(ids("ab"), ids("c")).result(10)
    print(*(task.prompt_uid for task in held), flush=True)
    sys.stdin.read()
"""

# Does every task, and prints the error that ends its loop.
DILIGENT = """
import sys
from turnstream.errors import NotReadyError, PromptsExhaustedError
from turnstream.generator import Publisher
from testkit import ids

url, run = sys.argv[1:]
with Publisher(url, run) as publisher:
    while True:
        try:
            task = publisher.next_task(1)
        except NotReadyError:
            continue
        except PromptsExhaustedError as error:
            print(type(error).__name__, flush=True)
            break
        with task:
            for trajectory in task.trajectories:
                trajectory.append(ids(task.payload.decode()), ids("x"))
                trajectory.seal(float(trajectory.key.sample))
"""


def give(url: str, run: str, *uids: str) -> None:
    with connect(url) as client:
        prompts = [Prompt(prompt_uid=uid, payload=uid.encode(), num_samples=2) for uid in uids]
        add_prompts(client, run, prompts)


def counts(url: str, run: str) -> PromptCounts:
    with connect(url) as client:
        read_ledger(client, run).check()
        return read_prompt_counts(client, run)


@pytest.mark.parametrize(
    "policy", [{}, {"deadline_policy": "refill", "max_refills": 4}], ids=["revisit", "refill"]
)
async def test_tasks_of_a_killed_generator_are_granted_again_and_trained_once(
    house: Any, start_process: Any, policy: dict[str, Any]
) -> None:
    run, trainer = await house.serve(
        batch_groups=1, lease_s=LEASE_S, takeover_s=TAKEOVER_S, **policy
    )
    give(house.url, run, *UIDS)
    doomed = start_process(DOOMED, house.url, run)
    assert await doomed.line() == "p0 p1"

    doomed.kill()
    doomed.wait()
    house.end_leases(run)
    diligent = start_process(DILIGENT, house.url, run)
    await trainer.start()
    trained: Counter[str] = Counter()
    for step in range(1, len(UIDS) + 1):
        pulled = await trainer.get(step)
        trained.update({uid for each in pulled for uid in each.mini_batch.rows.prompt_uid})
        assert all(row[:2] in {f"p{number}" for number in range(5)} for row in pulled[0].rows)
        await trainer.stepped(pulled)
    said = await diligent.line()

    assert trained == Counter(UIDS)
    assert said == "PromptsExhaustedError"
    seen = counts(house.url, run)
    assert (seen.num_trained, seen.num_left, seen.num_given) == (5, 0, 0)
    left: Any = house.client.hkeys(keys.run_keys(run).prompts)
    assert [name for name in left if name.isdigit()] == []
