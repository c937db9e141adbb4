"""Faults that leave a group unfinished: generators that die, sleep too long or hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from harness.episodes import episode
from harness.proxy import Proxy
from harness.rig import PATIENCE_S, Rig, config
from testkit.services.processes import frozen
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
    with frozen(zombie.pid):
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
