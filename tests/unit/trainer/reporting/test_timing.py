from __future__ import annotations

import contextlib

from turnstream_server.trainer.reporting.timing import StepClock


class Hands:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now_s


def test_parts_and_rest_of_a_step_sum_to_its_wall_time() -> None:
    wall, cpu = Hands(), Hands()
    clock = StepClock(wall=wall, cpu=cpu)
    with clock.measure("forward_backward"):
        wall.now_s += 5.0
        cpu.now_s += 9.0
    clock.move(2.0, source="forward_backward", target="optimizer")
    clock.add("wait", 0.5)
    wall.now_s += 1.0
    with clock.measure("publish"):
        wall.now_s += 0.25

    assert clock.lap() == {
        "step_s": 6.25,
        "wait_s": 0.5,
        "forward_backward_s": 3.0,
        "optimizer_s": 2.0,
        "publish_s": 0.25,
        "checkpoint_s": 0.0,
        "other_s": 0.5,
        "cpu_s": 9.0,
        "elapsed_s": 6.25,
    }


def test_time_after_a_lap_or_a_restart_belongs_to_the_next_step() -> None:
    wall = Hands()
    clock = StepClock(wall=wall, cpu=wall)
    wall.now_s += 1.0
    clock.lap()
    with contextlib.suppress(OSError), clock.measure("checkpoint"):
        wall.now_s += 2.0
        raise OSError("disk")  # its time counts all the same
    wall.now_s += 4.0
    second = clock.lap()
    with clock.measure("publish"):
        wall.now_s += 3.0
    clock.restart()
    third = clock.lap()

    assert (second["checkpoint_s"], second["other_s"], second["step_s"]) == (2.0, 4.0, 6.0)
    assert second["elapsed_s"] == 7.0
    names = ("step_s", "publish_s", "checkpoint_s", "cpu_s")
    assert [third[name] for name in names] == [0.0] * 4
