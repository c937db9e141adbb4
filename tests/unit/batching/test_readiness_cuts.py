"""Groups that continue without unsealed members, and are reopened by a refill."""

from __future__ import annotations

from dataclasses import replace

from testkit import config, sealed
from turnstream.batching.fold.decisions import Decision, GroupCut, RefillWanted
from turnstream.batching.fold.readiness import RunFold
from turnstream.types import Event, GroupOpened, RefillGranted, TrajectoryDied, TrajectoryKey

REFILL = replace(config(), deadline_policy="refill", max_refills=2)
OPENED = GroupOpened(group_id="g0", prompt_uid="", num_samples=3, num_needed=2)
CUT: list[Event] = [OPENED, sealed(sample=0), sealed(sample=1)]
DIED = TrajectoryDied(key=TrajectoryKey("g0", 0), reason="checksum")
REFILLED: list[Event] = [
    RefillGranted(key=TrajectoryKey("g0", 0, 1), number=1),
    sealed(sample=0, attempt=1),
]


def hear(state: RunFold, *events: Event, at: int = 1) -> list[Decision]:
    return [each for i, event in enumerate(events) for each in state.apply(f"{at + i}-0", event)]


def test_a_cut_does_not_hold_while_its_group_is_open_again() -> None:
    state = RunFold(REFILL)
    (cut,) = hear(state, *CUT)
    held_before = state.still_holds(cut)

    hear(state, DIED, at=4)
    held_while_open = state.still_holds(cut)
    hear(state, *REFILLED, at=5)

    assert (held_before, held_while_open, state.still_holds(cut)) == (True, False, True)


def test_group_reopened_by_a_refill_is_cut_again_when_decided() -> None:
    # The store has it open: another attempt of the sample that was cut may have begun.
    state = RunFold(REFILL)
    (cut,) = hear(state, *CUT)

    asked, again = hear(state, DIED, *REFILLED, at=4)

    assert isinstance(asked, RefillWanted)
    assert isinstance(cut, GroupCut)
    assert again == replace(cut, num_granted=1)


def test_group_cut_before_its_refill_event_is_cut_again() -> None:
    # The store had granted it before the cut, and had the group open since.
    state = RunFold(REFILL)
    hear(state, *CUT, DIED)
    (cut,) = hear(state, sealed(sample=2), at=5)

    heard = hear(state, REFILLED[0], REFILLED[0], at=6)

    assert isinstance(cut, GroupCut)
    assert heard == [replace(cut, num_granted=1)]


def test_refill_of_an_uncut_group_is_reported_when_it_decides() -> None:
    # It gave the group another deadline.
    state = RunFold(REFILL)
    hear(state, replace(OPENED, num_samples=2), sealed(sample=0), sealed(sample=1))

    _, cut = hear(state, DIED, *REFILLED, at=4)

    assert isinstance(cut, GroupCut)
    assert (cut.group_id, cut.num_granted) == ("g0", 1)


def test_cut_is_void_after_a_config_that_keeps_surplus() -> None:
    state = RunFold(REFILL)
    (cut,) = hear(state, *CUT)
    hear(state, DIED, at=4)
    state.revise("5-0", replace(REFILL, surplus="keep"))

    decided = hear(state, *REFILLED, at=6)

    assert decided == []
    assert state.num_ready == 1
    assert not state.still_holds(cut)
