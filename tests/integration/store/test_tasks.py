"""Prompts that a run carries, given out script by script."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from testkit.runs.run_driver import Drive, RunDriver
from testkit.runs.tasks import next_task
from turnstream.errors import (
    ConflictError,
    EndOfRunError,
    InvalidTurnError,
    RejectedError,
    RunNotFoundError,
)
from turnstream.generator.requests import open_task
from turnstream.records.events import encode_event
from turnstream.store.run.runs import pause_run, resume_run
from turnstream.store.run.tasks import (
    NoTask,
    OfferedTask,
    Prompt,
    TakenTask,
    add_prompts,
    next_task_command,
    parse_offer,
    parse_task,
    read_prompt_counts,
    tasks_to_pass,
)
from turnstream.types import GroupOpened, TrajectoryKey

pytestmark = pytest.mark.redis


def prompt(uid: str, payload: bytes = b"", *, num_samples: int = 2, num_needed: int = 0) -> Prompt:
    return Prompt(prompt_uid=uid, payload=payload, num_samples=num_samples, num_needed=num_needed)


def ask(run: Any, writer: str = "w") -> TakenTask | NoTask:
    return next_task(run.client, run.name, writer=writer)


def take(run: Any, writer: str = "w") -> TakenTask:
    found = ask(run, writer)
    assert isinstance(found, TakenTask), found
    return found


def open_offer(run: Any, offer: OfferedTask, writer: str) -> TakenTask:
    opened = parse_task(offer, run.do(open_task(run.name, offer, writer=writer).command))
    assert isinstance(opened, TakenTask), opened
    return opened


def offered(run: Any, *, num_passed: int) -> OfferedTask:
    offer = parse_offer(run.do(next_task_command(run.name, num_passed=num_passed)))
    assert isinstance(offer, OfferedTask), offer
    return offer


def fingerprints(names: Iterable[str]) -> Any:
    """The content of the key `over` for finished groups of these names: see finished_names.lua."""
    buckets: dict[str, bytes] = {}
    for name in names:
        digest = hashlib.sha1(name.encode(), usedforsecurity=False)
        bucket = digest.hexdigest()[:3]
        buckets[bucket] = buckets.get(bucket, b"") + digest.digest()[:8]
    return buckets


def wait(run: Any) -> NoTask:
    found = ask(run)
    assert isinstance(found, NoTask), found
    return found


uids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(uid=uids)
@example(uid="~ä/\n#1:%23")
def test_prompt_of_any_name_becomes_group_with_its_event(drive: Drive, uid: str) -> None:
    run = drive()
    add_prompts(run.client, run.name, [prompt(uid, b"1:2", num_samples=9, num_needed=7)])

    taken = take(run)

    opened = GroupOpened(group_id=f"{uid}#1", prompt_uid=uid, num_samples=9, num_needed=7)
    assert (taken.task.group, taken.task.payload) == (opened, b"1:2")
    assert run.events() == [encode_event(opened)]


def test_offered_task_is_opened_for_one_of_two_writers(run: RunDriver) -> None:
    # A writer that dies with an offer leaves no trace.
    add_prompts(run.client, run.name, [prompt("a"), prompt("b")])
    before = read_prompt_counts(run.client, run.name)

    offers: list[Any] = [parse_offer(run.do(next_task_command(run.name))) for _ in range(2)]
    between = read_prompt_counts(run.client, run.name)
    first, second, repeated = (open_offer(run, offers[0], writer) for writer in ("a", "b", "a"))

    assert offers[0] == offers[1]
    assert between == before
    assert (len(first.epochs), second.epochs) == (2, {})
    assert repeated == first
    assert take(run, "b").task.group.group_id == "b#1"
    assert read_prompt_counts(run.client, run.name).num_given == 2


def test_offered_task_whose_group_failed_since_is_not_opened(run: RunDriver) -> None:
    add_prompts(run.client, run.name, [prompt("a")])
    offer = take(run).task
    run.client.hset(run.keys.groups, "a%231", "2:incomplete")
    run.client.hdel(run.keys.tasks, "a%231")
    run.client.zadd(run.keys.retry, {"1": 1})

    late = open_offer(run, offer, "v")

    assert late.epochs == {}
    assert take(run).task.group.group_id == "a#2"


def test_task_of_a_lost_prompt_is_opened_without_the_new_one(run: RunDriver) -> None:
    # After a power cut the number of the lost prompt belonged to another, which was never sampled.
    add_prompts(run.client, run.name, [prompt("b", num_samples=1)])
    offer = parse_offer(run.do(next_task_command(run.name)))
    assert isinstance(offer, OfferedTask)
    lost = replace(
        offer,
        group=replace(offer.group, group_id="a#1", prompt_uid="a"),
        trajectory_ids=("a%231/0/0",),
    )

    opened = open_offer(run, lost, "w")

    assert len(opened.epochs) == 1
    assert take(run).task.group.group_id == "b#1"


def test_prompts_that_are_sent_twice_are_there_once(run: RunDriver) -> None:
    prompts = [prompt(f"p{number}") for number in range(600)]

    added = [add_prompts(run.client, run.name, prompts[:300], first=1) for _ in range(2)]
    added.append(add_prompts(run.client, run.name, prompts, first=1))
    added.append(add_prompts(run.client, run.name, []))

    assert added == [300, 300, 600, 600]
    assert [take(run).task.group.prompt_uid for _ in range(3)] == ["p0", "p1", "p2"]


def test_other_prompts_of_the_same_numbers_are_refused_whole(run: RunDriver) -> None:
    add_prompts(run.client, run.name, [prompt("a"), prompt("b")])

    with pytest.raises(ConflictError, match="prompt 2 is there with another content"):
        add_prompts(run.client, run.name, [prompt("a"), prompt("c"), prompt("d")], first=1)
    with pytest.raises(ConflictError, match="prompt 4 does not follow prompt 2"):
        add_prompts(run.client, run.name, [prompt("e")], first=4)

    assert read_prompt_counts(run.client, run.name).num_added == 2


def test_group_without_admission_uses_no_prompt(drive: Drive) -> None:
    run = drive(batch_groups=1, max_staleness=0, max_planned_ahead=0)
    add_prompts(run.client, run.name, [prompt("a"), prompt("b")])
    take(run)

    refused = wait(run)
    run.client.hset(run.keys.frontier, "stepped", 1)
    taken = take(run)

    assert refused.why == "1 groups are live, 1 are allowed after step 0"
    assert taken.task.group.prompt_uid == "b"


def test_task_of_a_prompt_with_many_visits_reads_few_names(run: RunDriver) -> None:
    # Each finished visit was looked up: a prompt with 20,000 of them stopped the store for 157 ms.
    add_prompts(run.client, run.name, [prompt("a")])
    run.client.hset(
        run.keys.finished_groups, mapping=fingerprints(f"a%23{n}" for n in range(1, 20_001))
    )
    run.do(next_task_command(run.name))
    run.client.config_resetstat()

    offer = parse_offer(run.do(next_task_command(run.name)))

    assert isinstance(offer, OfferedTask)
    assert offer.group.group_id == "a#20001"
    commands: Any = run.client.info("commandstats")
    assert commands["cmdstat_hexists"]["calls"] < 40


def test_writers_that_lost_a_task_spread_over_the_later_ones(run: RunDriver) -> None:
    # All idle writers got the same offer each time: 64 of them made 2,080 offers for 64 tasks.
    num_offers, losses = 0, dict.fromkeys((f"w{n}" for n in range(64)), 0)
    chance = random.Random(0)
    add_prompts(run.client, run.name, [prompt(f"p{n}") for n in range(70)])
    opened: list[str] = []

    while losses:
        offers = {
            each: offered(run, num_passed=tasks_to_pass(chance.random(), num_lost=lost))
            for each, lost in losses.items()
        }
        num_offers += len(offers)
        for writer, offer in offers.items():
            if open_offer(run, offer, writer).epochs:
                opened.append(offer.group.group_id)
                del losses[writer]
            else:
                losses[writer] += 1

    assert num_offers < 700
    assert len({*opened}) == len(opened) == 64
    assert read_prompt_counts(run.client, run.name).num_left == 6
    rest = [take(run).task.group.group_id for _ in range(6)]
    assert {*opened, *rest} == {f"p{n}#1" for n in range(70)}


def test_tasks_are_passed_over_in_order_and_from_the_first_again(drive: Drive) -> None:
    run = drive(deadline_policy="refill", max_refills=3, group_deadline_s=9)
    add_prompts(run.client, run.name, [prompt(each) for each in "abcd"])
    for _ in range(2):
        take(run)
    run.client.zadd(run.keys.retry, {"1": 1})

    names = [offered(run, num_passed=n).group.group_id for n in range(4)]
    for n in (2, 1):
        run.client.zadd(run.keys.refills, {f"b%231/{n - 1}/{n}": n})
    refills = [offered(run, num_passed=n).trajectory_ids for n in range(3)]

    assert names == ["a#2", "c#1", "d#1", "a#2"]
    assert refills == [("b%231/0/1",), ("b%231/1/2",), ("b%231/0/1",)]


def test_prompt_far_after_the_newest_given_one_is_refused(run: RunDriver) -> None:
    # Every prompt before it became one to be given out again, in one call.
    run.client.hset(
        run.keys.prompts, mapping={"added": 20_000, "10001": "2/2:a:", "10000": "2/2:b:"}
    )
    far, near = (
        OfferedTask(
            group=GroupOpened(group_id=f"{uid}#1", prompt_uid=uid, num_samples=2),
            number=number,
            payload=b"",
            trajectory_ids=(f"{uid}%231/0/0",),
        )
        for uid, number in (("a", 10_001), ("b", 10_000))
    )

    with pytest.raises(
        RejectedError, match=r"prompt 10001 of group a#1 is above 10000: 0 is the newest"
    ):
        open_offer(run, far, "w")

    assert run.ledger() == {}
    assert open_offer(run, near, "w").epochs
    assert run.client.zcard(run.keys.retry) == 9_999


def test_a_name_that_was_used_is_not_used_again(run: RunDriver) -> None:
    run.do(run.open_group(group="a%231"))
    add_prompts(run.client, run.name, [prompt("a"), prompt("a")])

    assert [take(run).task.group.group_id for _ in range(2)] == ["a#2", "a#3"]


def test_refill_precedes_the_next_prompt_with_its_own_payload(run: RunDriver) -> None:
    add_prompts(run.client, run.name, [prompt("a", b"x", num_samples=3, num_needed=2), prompt("b")])
    take(run)
    run.client.hset(run.keys.members, "a%231", "2:0:1:a")
    run.client.zadd(run.keys.refills, {"a%231/1/1": 1})

    refill = take(run, "v")
    after = take(run, "v")

    assert refill.epochs == {TrajectoryKey("a#1", 1, 1): 1}
    assert (refill.task.payload, refill.task.group.num_needed) == (b"x", 2)
    assert after.task.group.prompt_uid == "b"


def test_missing_task_has_its_reason(run: RunDriver) -> None:
    before = wait(run)
    add_prompts(run.client, run.name, [prompt("a"), prompt("b")])
    take(run)
    take(run)

    given = wait(run)
    run.client.hset(run.keys.prompts, "done", 2)
    done = wait(run)

    assert before.why == "the run was given no prompt"
    assert given.why == "no prompt is left: 2 of 2 are given out and not done"
    assert done.why == "all 2 prompts of the run are done"
    assert [each.is_exhausted for each in (before, given, done)] == [False, False, True]
    assert before.wake_id == "0-0" != given.wake_id  # new prompts wake waiting generators


def test_a_closed_run_gives_out_no_prompt_and_takes_none(run: RunDriver) -> None:
    add_prompts(run.client, run.name, [prompt("a")])
    run.do(run.close())

    with pytest.raises(EndOfRunError, match="no new group"):
        ask(run)
    with pytest.raises(EndOfRunError, match="no new prompt"):
        add_prompts(run.client, run.name, [prompt("b")])
    assert add_prompts(run.client, run.name, [prompt("a")], first=1) == 1


def test_a_closed_run_whose_groups_may_be_refilled_lets_its_generators_wait(drive: Drive) -> None:
    run = drive(deadline_policy="refill", max_refills=1)
    add_prompts(run.client, run.name, [prompt("a")])
    take(run)
    run.do(run.close())

    assert wait(run).why == "the run is closed; 1 groups are open, and may be refilled"


def test_a_run_that_is_not_there_is_refused(run: RunDriver) -> None:
    run.client.delete(run.keys.frontier)

    with pytest.raises(RunNotFoundError):
        ask(run)
    with pytest.raises(RunNotFoundError):
        add_prompts(run.client, run.name, [prompt("a")])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_uid": "x" * 503}, "prompt_uid: a name of 515 characters"),
        ({"num_needed": 3}, "num_needed: 3 of 2 samples"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTurnError, match=f"^{message}"):
        Prompt(**{"prompt_uid": "a", "payload": b"", "num_samples": 2, **fields})


def test_a_paused_run_gives_out_refills_alone_and_says_why(drive: Drive) -> None:
    run = drive(deadline_policy="refill", max_refills=1)
    add_prompts(run.client, run.name, [prompt("a"), prompt("b")])
    take(run)
    run.client.zadd(run.keys.refills, {"a%231/0/1": 1})
    pause_run(run.client, run.name, "the judge is down")

    refill, told = take(run), wait(run)
    resume_run(run.client, run.name)
    pause_run(run.client, run.name)
    without_reason = wait(run)
    resume_run(run.client, run.name)

    assert list(refill.epochs) == [TrajectoryKey("a#1", 0, 1)]
    assert (told.why, told.is_exhausted) == ("the run is paused: the judge is down", False)
    assert without_reason.why == "the run is paused"
    assert take(run).task.group.group_id == "b#1"
