"""Each cause of a wait in a run on a real store, as `turnstream why` shows it.

Kinds that a generator sees first are in tests/integration/generator/test_wait_reasons.py, and a
full store is in tests/integration/batcher/test_health.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from turnstream.errors import WaitKind
from turnstream.records.events import encode_event
from turnstream.store.client.scripts import run_command_async
from turnstream.store.run.runs import close_run, pause_run
from turnstream.store.run.tasks import Prompt, add_prompts
from turnstream.store.waits.wait_reasons import UNSEALED, reasons
from turnstream.types import TrajectoryAbandoned, TrajectoryKey, TrajectoryState
from turnstream_server.ledger.leadership.leader_fields import note_trouble, release_leadership
from turnstream_server.ledger.queries.run_snapshot import read_snapshot
from turnstream_server.ledger.sessions.observers import declare_observer
from turnstream_server.ledger.sessions.sessions import note_damage

OF_GENERATORS = {
    *(WaitKind.NO_ADMISSION, WaitKind.NOT_READY, WaitKind.NOT_ACKNOWLEDGED),
    *(WaitKind.STORE_AWAY, WaitKind.STORE_FULL),
}


async def nothing(_: Any) -> None:
    """Leave the run as it is."""


async def open_group(run: Any) -> None:
    await run.open("a")


async def lapse(run: Any) -> None:
    await run.open("a", num_samples=1)
    await run.client.zadd(run.keys.leases, {"a/0/0": 1})


async def start_one_of_two(run: Any) -> None:
    await run.open("a", num_opened=1)


async def await_reward(run: Any) -> None:
    await run.open("a", num_samples=1)
    await run.seal("a", 0, awaits_reward=True)


async def grant(run: Any) -> None:
    await run.open("a", num_samples=3, num_needed=2)
    await run.grant("a", 2)


async def leave_without_a_seal(run: Any) -> None:
    await run.open("a", num_samples=1)
    record = encode_event(TrajectoryAbandoned(key=TrajectoryKey("a", 0), reason=UNSEALED))
    command = run.commands.abandon("a/0/0", reason=UNSEALED, record=record)
    await run_command_async(run.client, command)


async def drop(run: Any) -> None:
    await run.open("a", num_samples=1, num_sealed=1)
    await run.settle("a", TrajectoryState.FILTERED, 0)


async def end_all_prompts(run: Any) -> None:
    add_prompts(run.store, run.name, [Prompt(prompt_uid="p", payload=b"", num_samples=1)])
    await run.client.hset(run.keys.prompts, mapping={"next": 1, "done": 1})


async def plan_one(run: Any) -> None:
    await run.plan_steps(1)


async def plan_ahead(run: Any) -> None:
    await run.plan_steps(2)


async def pause(run: Any) -> None:
    pause_run(run.store, run.name, "the judge is down")


async def close(run: Any) -> None:
    await run.open("a")
    close_run(run.store, run.name)


async def finish(run: Any) -> None:
    close_run(run.store, run.name)


async def damage(run: Any) -> None:
    await run.plan_steps(1)
    where: dict[str, Any] = {"step": 1, "manifest_hash": run.manifests[1].hash}
    await note_damage(run.client, run.name, **where, sentence="step 1: damaged payload")


async def keep_a_dead_letter(run: Any) -> None:
    await run.open("a", num_sealed=2)
    await run.kill("a", 0)


async def fail_to_plan(run: Any) -> None:
    await note_trouble(run.term, "planning_trouble", "no space", owner="p")


async def fail_to_release(run: Any) -> None:
    await note_trouble(run.term, "release_trouble", "no space", owner="p")


async def keep_for_an_observer(run: Any) -> None:
    await run.plan_steps(2)
    where: dict[str, Any] = {"observer": "audit", "first_step": 1, "expiry_s": 60}
    await declare_observer(run.client, run.name, **where)
    await run.commit(await run.start("s"), 1)


async def end_the_planner(run: Any) -> None:
    await run.open("a")
    await release_leadership(run.term, owner="p")


async def announce_nothing(run: Any) -> None:
    await run.plan_steps(1)
    await run.step(await run.start("s"), 1)
    await run.client.hset(run.keys.frontier, mapping={"announced": 0, "live_groups": 2})


STARVED = WaitKind.TOO_FEW_READY
SMALL = {"max_staleness": 0, "max_planned_ahead": 0}
SCENES: list[tuple[Callable[[Any], Awaitable[None]], WaitKind, str, dict[str, Any]]] = [
    (nothing, STARVED, "0 of 1 groups ready, and no generator has a", {}),
    (open_group, STARVED, "0 of 1 groups ready, 1 open", {}),
    (end_all_prompts, STARVED, "all 1 prompts of the run are done, 0 of them filtered", {}),
    (open_group, WaitKind.MEMBER_OPEN, "waits for sample 1 of generator writer for ", {}),
    (start_one_of_two, WaitKind.MEMBER_OPEN, "group a (0 of 2 members) waits for sample 1", {}),
    (await_reward, WaitKind.MEMBER_OPEN, "waits for the reward of sample 0, which is sealed", {}),
    (grant, WaitKind.MEMBER_OPEN, "attempt 1 of sample 2 of group a was granted ", {}),
    (lapse, WaitKind.GENERATOR_GONE, "generator writer is gone: all 1 trajectories", {}),
    (lapse, WaitKind.GENERATOR_GONE, "waits for sample 0 of generator writer for ", {}),
    (
        leave_without_a_seal,
        WaitKind.NO_SIGNAL,
        "1 trajectories were left without a seal",
        {"batch_groups": 2},
    ),
    (drop, WaitKind.NO_SIGNAL, "1 of the 1 groups that were decided were dropped", {}),
    (plan_one, WaitKind.NOTHING_WRONG, "nothing is wrong: step 1 is offered", {}),
    (plan_ahead, WaitKind.TRAINER_NOT_STEPPED, "no trainer session has begun for ", {}),
    (pause, WaitKind.RUN_PAUSED, "the run is paused: the judge is down; no group starts", {}),
    (close, WaitKind.RUN_CLOSED, "is closed: it takes no new group", {}),
    (finish, WaitKind.RUN_CLOSED, "is closed and finished: all 0 steps are stepped", {}),
    (damage, WaitKind.PAYLOAD_DAMAGED, "step 1: damaged payload; `turnstream run replan ", {}),
    (keep_a_dead_letter, WaitKind.PAYLOAD_DAMAGED, "1 of trajectories, 0 of events; the new", {}),
    (fail_to_plan, WaitKind.PLANNING_FAILS, "batcher p cannot plan the run: no space", {}),
    (fail_to_release, WaitKind.RELEASE_FAILS, "cannot release finished steps: no space", {}),
    (keep_for_an_observer, WaitKind.RELEASE_FAILS, "is deleted: observer 'audit' has seen", {}),
    (end_the_planner, WaitKind.BATCHER_AWAY, "no batcher plans the run", {}),
    (open_group, WaitKind.OUT_OF_CAPACITY, "1 groups are live, 1 are allowed after step 0", SMALL),
    (announce_nothing, WaitKind.OUT_OF_CAPACITY, "its weights are not announced for ", SMALL),
    (
        plan_one,
        WaitKind.OUT_OF_BYTES,
        "less than the 1 retained steps take",
        {"max_bytes": 4_100},
    ),
]
"""What happens to a run, and the kind and a part of the sentence that it is a reason for."""


async def test_every_cause_is_seen_in_a_real_run(start_run: Any) -> None:
    for scene, kind, words, settings in SCENES:
        run = await start_run(**settings)
        await scene(run)
        found = reasons(read_snapshot(run.store, run.name))
        assert [each for each in found if each.kind is kind and words in each.sentence], found

    assert {kind for _, kind, _, _ in SCENES} | OF_GENERATORS == set(WaitKind)
