from __future__ import annotations

import contextlib

import pytest

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


def test_time_after_a_lap_belongs_to_the_next_step() -> None:
    wall = Hands()
    clock = StepClock(wall=wall, cpu=Hands())
    wall.now_s += 1.0
    clock.lap()
    with clock.measure("checkpoint"):
        wall.now_s += 2.0
    wall.now_s += 4.0

    second = clock.lap()

    assert (second["checkpoint_s"], second["other_s"], second["step_s"]) == (2.0, 4.0, 6.0)
    assert second["elapsed_s"] == 7.0
    assert clock.lap()["checkpoint_s"] == 0.0


def test_restart_drops_the_time_before_it() -> None:
    wall = Hands()
    clock = StepClock(wall=wall, cpu=wall)
    with clock.measure("publish"):
        wall.now_s += 3.0

    clock.restart()

    times = clock.lap()
    assert (times["step_s"], times["publish_s"], times["cpu_s"]) == (0.0, 0.0, 0.0)


def test_a_part_is_measured_also_if_it_fails() -> None:
    wall = Hands()
    clock = StepClock(wall=wall, cpu=wall)
    with contextlib.suppress(OSError), clock.measure("checkpoint"):
        wall.now_s += 3.0
        raise OSError("disk")

    assert clock.lap()["checkpoint_s"] == 3.0


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(KeyError, match="sleep"):
        StepClock().add("sleep", 1.0)
