"""Faults that leave a group unfinished: generators that die, sleep too long or hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from harness.episodes import episode
from harness.machine import asleep
from harness.proxy import Proxy
from harness.rig import GENERATOR_LEASE_S, PATIENCE_S, Rig, config
from turnstream.store.client import keys
from turnstream_server.launch.stack import Service

pytestmark = [pytest.mark.e2e, pytest.mark.grpc, pytest.mark.timeout(600)]

StartRig = Callable[..., Rig]
LEASE_S = 1.0
"""Short, so that a test need not wait long for its end."""

LOST = "w-1/0/0"
"""The trajectory that is left open, behind its first turn."""

CUT = "w-1/1/0"
"""Its generator dies inside the second of three turns. The other member is sealed by then."""

REFILLS = {f"h-0/2/{refill}" for refill in range(1, 5)}
"""Refills of the trajectory that hangs until the deadline of its group."""


def _start_rig(start_rig: StartRig, **fields: Any) -> Rig:
    """Batches of two groups; leases are short, unless `fields` says otherwise."""
    small = {"batch_groups": 2, "mini_batch_groups": 1, "lease_s": LEASE_S}
    return start_rig(config=config(**{**small, **fields}))


def _start_hanging(rig: Rig, **options: Any) -> Service:
    generator = rig.start_generator("w", groups=4, **{"hang_in": LOST, **options})
    rig.wait_for_lines("hanging")
    return generator


def _num_turns(rig: Rig, trajectory: str = LOST) -> int:
    found: Any = rig.client.xlen(keys.trajectory_keys(rig.run, trajectory).turns)
    return found


def _sealed_by(rig: Rig, trajectory: str) -> list[str]:
    sealed = rig.history().of("sealed")
    return [line.process for line in sealed if line["trajectory"] == trajectory]


def test_trajectory_of_a_killed_generator_is_kept_until_its_lease_ends(
    start_rig: StartRig,
) -> None:
    # Fault 1: abandoned, and its group is dropped with a reason.
    rig = _start_rig(start_rig, takeover_s=1.0)
    others = rig.start_generator("v", groups=5)
    generator = _start_hanging(rig)
    rig.join(others)

    generator.kill()

    assert rig.entry(LOST) == "open:1:w"  # no batcher leads yet, and none would have ended it
    assert _num_turns(rig) == 1
    rig.start_batcher()
    rig.wait(lambda: rig.entry(LOST).startswith("abandoned:"), "the end of the lease")
    assert rig.entry(LOST) == "abandoned:the lease of w ended"
    rig.drain()
    assert rig.trained() == {f"{g}/{s}/0" for g in ("w-0", *_groups("v", 5)) for s in range(2)}


def _groups(writer: str, count: int) -> list[str]:
    return [f"{writer}-{number}" for number in range(count)]


def _num_open(rig: Rig) -> int:
    return rig.counts().get("open", 0)


@pytest.fixture
def start_inside(start_rig: StartRig) -> Iterator[Callable[..., Rig]]:
    """`start_inside(arrives, **fields of the config)`: a generator dies inside its second turn."""
    with ExitStack() as stack:

        def start(arrives: str, **fields: Any) -> Rig:
            rig = _start_rig(start_rig, **fields)
            rig.start_batcher()
            proxy = stack.enter_context(Proxy(rig.server.url))
            rig.store_url, may_go_on = proxy.url, rig.folder / "go on"
            generator = _start_hanging(rig, hang_in=CUT, hang_until=may_go_on)
            if arrives == "half":
                proxy.stop_within = _second_turn()
            else:
                proxy.unanswered = _second_turn()
            may_go_on.touch()
            num_stored = {"half": 1, "all": 2}[arrives]
            rig.wait(lambda: proxy.num_breaks == 2 - num_stored, "half a turn")
            rig.wait(lambda: _num_turns(rig, CUT) == num_stored, "a turn that is stored")
            generator.kill()
            rig.store_url = rig.server.url
            return rig

        yield start


def _second_turn() -> bytes:
    """Return the sampled bytes of the second turn, which are unique."""
    return episode(CUT, writer="w").turns[1].response_ids.tobytes()


@pytest.mark.parametrize(("arrives", "num_kept"), [("half", 1), ("all", 2)])
def test_generator_killed_inside_a_turn_leaves_whole_turns_to_its_successor(
    start_inside: Callable[..., Rig], arrives: str, num_kept: int
) -> None:
    # Fault 1, inside a chunk: half of the turn has arrived, or all of it and no answer came.
    rig = start_inside(arrives, takeover_s=60.0)

    end = rig.start_helper()
    rig.wait(lambda: _sealed_by(rig, CUT), "the seal of the helper")
    rig.wait(lambda: _num_open(rig) == 0, "the rest of the group")
    end.touch()
    rig.drain()

    (taken,) = [line for line in rig.history().of("adopted") if line["trajectory"] == CUT]
    waits = [
        line for line in rig.history().of("waiting", "waited") if line.process == "generator-w"
    ]
    assert (waits[-1].kind, waits[-1]["what"]) == ("waiting", "append")
    assert taken["num_turns"] == num_kept
    assert CUT in rig.trained()


@pytest.mark.parametrize("arrives", ["half", "all"])
def test_group_of_a_generator_killed_inside_a_turn_is_refilled(
    start_inside: Callable[..., Rig], arrives: str
) -> None:
    # Fault 1, inside a chunk: no generator adopts it, and the dead attempt is never trained.
    rig = start_inside(arrives, takeover_s=60.0, deadline_policy="refill", max_refills=4)

    rig.end_leases(ago_s=60.0)
    rig.wait(lambda: rig.entry(CUT).startswith("abandoned:"), "the end of the lease")
    end = rig.start_helper()
    rig.wait_for_lines("granted")
    rig.wait(lambda: _num_open(rig) == 0, "the end of all attempts")
    end.touch()
    rig.drain()

    assert {"w-1/0/0", "w-1/1/1"} <= rig.trained()
    assert CUT not in rig.trained()


@pytest.mark.parametrize("wakes", ["before the seal", "after the seal"])
def test_generator_that_sleeps_through_its_lease_is_fenced(start_rig: StartRig, wakes: str) -> None:
    # Fault 3: the zombie wakes while another writes what was its own, or when that is sealed.
    rig = _start_rig(start_rig, takeover_s=60.0)
    rig.start_batcher()
    may_wake, may_seal = rig.folder / "wake", rig.folder / "seal"
    zombie = _start_hanging(rig, hang_until=may_wake)
    with asleep(zombie.pid):
        end = rig.start_helper(hang_in=LOST, hang_until=may_seal)
        rig.wait_for_lines("hanging", 2)
        if wakes == "after the seal":
            may_seal.touch()
            rig.wait(lambda: _sealed_by(rig, LOST), "the seal of the helper")
        may_wake.touch()

    rig.wait(lambda: _refusals_of(rig, "generator-w"), "the refusal of the late writer")

    may_seal.touch()
    rig.wait(lambda: _sealed_by(rig, LOST), "the seal of the helper")
    assert _sealed_by(rig, LOST) == ["generator-helper"]
    rig.wait(lambda: _num_open(rig) == 0, "the other trajectories")
    end.touch()
    zombie.wait(PATIENCE_S)
    refusals = _refusals_of(rig, "generator-w")
    assert all("FencedError" in error for error in refusals.values())
    rig.drain(num_lost=len(refusals))
    assert LOST in refusals
    assert LOST in rig.trained()


def _refusals_of(rig: Rig, process: str) -> dict[str, str]:
    refused = (line for line in rig.history().of("refused") if line.process == process)
    return {line["trajectory"]: line["error"] for line in refused if "trajectory" in line.facts}


@pytest.mark.parametrize("policy", ["drop", "train_short", "refill"])
def test_member_that_hangs_delays_its_group_until_the_deadline(
    start_rig: StartRig, policy: str
) -> None:
    # Fault 21: the generator lives and keeps its lease. A restarted batcher reads the same events
    # and is not delayed again. All other groups are complete before a batcher leads, so only the
    # deadline of the hanging group passes. A refill has a longer deadline; on a busy machine it may
    # pass too, and another refill follows.
    deadline: dict[str, Any] = {"group_deadline_s": 0.5}
    if policy == "refill":
        deadline = {"group_deadline_s": 4.0, "max_refills": len(REFILLS)}
    rig = _start_rig(start_rig, lease_s=GENERATOR_LEASE_S, deadline_policy=policy, **deadline)
    hung = "h-0/2/0"
    rig.start_generator("h", groups=1, samples=3, hang_in=hung)
    end = rig.start_helper()
    rig.join(rig.start_generator("w", groups=5))
    rig.wait_for_lines("hanging")
    batcher = rig.start_batcher()
    before = {f"h-0/{sample}/0" for sample in range(2)}

    rig.wait(lambda: rig.planned() >= 2, "batches of the other groups")
    rig.wait(lambda: _is_decided(rig, policy), "the decision at the deadline")
    batcher.kill()
    rig.start_batcher()
    rig.join(rig.start_ranks(1, checkpoint_every=1, max_steps=2))
    rig.kill_generator("h")
    rig.excused = {hung} if policy == "train_short" else set()
    end.touch()
    rig.drain()

    trained = {name for name in rig.trained() if name.startswith("h-")}
    refilled = trained & REFILLS
    assert len(refilled) == (1 if policy == "refill" else 0)
    assert trained == (set() if policy == "drop" else before | refilled)


def _is_decided(rig: Rig, policy: str) -> bool:
    """Whether the ledger says what became of the group; its reason is there to be read."""
    first, hung = rig.entry("h-0/0/0"), rig.entry("h-0/2/0")
    if policy == "drop":
        return first.startswith("incomplete") and "its deadline passed" in first
    if policy == "train_short":
        return first.startswith("planned") and not hung.startswith("open")
    return any(rig.entry(name).startswith(("sealed", "planned")) for name in REFILLS)
