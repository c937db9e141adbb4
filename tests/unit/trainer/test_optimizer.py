import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from turnstream.errors import InvalidConfigError
from turnstream_server.trainer.optimizer import Optimizer, Schedule
from turnstream_server.trainer.settings import (
    SCHEDULES,
    AdamSettings,
    ScheduleSettings,
    parse_arguments,
)

SETTINGS = [
    AdamSettings(learning_rate=0.1, max_grad_norm=0),
    AdamSettings(learning_rate=0.02, beta1=0.5, beta2=0.9, weight_decay=0.3, max_grad_norm=0.5),
    AdamSettings(learning_rate=0.3, eps=1e-2, weight_decay=0.1),
]


def test_steps_with_their_own_settings_equal_a_float64_reference() -> None:
    matrix, vector = Parameter(torch.tensor([[1.0, -2.0]])), Parameter(torch.tensor([0.5]))
    optimizer = Optimizer([("matrix", matrix), ("vector", vector)])
    weights = [matrix.detach().double().clone(), vector.detach().double().clone()]
    moments = [[torch.zeros_like(each), torch.zeros_like(each)] for each in weights]

    for number, settings in enumerate(SETTINGS, start=1):
        gradients = [torch.tensor([[3.0, -1.0]]) / number, torch.tensor([2.0]) * number]
        matrix.grad, vector.grad = gradients[0].clone(), gradients[1].clone()
        report = optimizer.step(settings)

        norm = math.sqrt(sum(float(each.double().square().sum()) for each in gradients))
        scale = min(1.0, settings.max_grad_norm / norm) if settings.max_grad_norm else 1.0
        for index, gradient in enumerate(gradients):
            decay = settings.weight_decay if index == 0 else 0.0
            clipped = gradient.double() * scale
            _step_reference(weights[index], moments[index], clipped, number, settings, decay)
        assert report.gradient_norm == pytest.approx(norm)
        assert report.is_applied
        torch.testing.assert_close(matrix.double(), weights[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(vector.double(), weights[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gradient_that_is_not_finite_is_skipped_with_its_parameter(bad: float) -> None:
    good, broken = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    optimizer = Optimizer([("good", good), ("broken", broken)])
    good.grad, broken.grad = torch.ones(2), torch.tensor([1.0, bad])

    report = optimizer.step(SETTINGS[0])

    assert report.skip_reason == f"gradient norm is {bad}: 1 of 2 weights (broken)"
    assert (optimizer.num_steps, optimizer.num_skipped) == (1, 1)
    assert torch.equal(good, torch.ones(2))
    assert not optimizer.state_dict()["adamw"]["state"]
    large = Parameter(torch.ones(2))
    large.grad = torch.full((2,), 3e38)
    beyond = Optimizer([("large", large)]).step(SETTINGS[1])
    assert beyond.skip_reason == "gradient norm is inf: it exceeds float32"


def test_linear_and_cosine_rates_grow_and_fall_between_zeros() -> None:
    linear = Schedule(_schedule("linear"), learning_rate=2.0)
    cosine = Schedule(_schedule("cosine"), learning_rate=1.0)

    rates = [linear.learning_rate(update) for update in range(1, 7)]
    assert rates == [1.0, 2.0, 1.5, 1.0, 0.5, 0.5]
    falling = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    rates = [cosine.learning_rate(update) for update in range(1, 6)]
    assert rates == pytest.approx([0.5, *falling])


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_rates_above_zero(name: str) -> None:
    arguments: dict[str, Any] = {
        "warmup_stable_decay": {"num_decay_steps": 2},
        "cosine_with_min_lr": {"min_lr_rate": 0.1},
    }.get(name, {})
    warmup = 0 if name == "constant" else 2
    total = 0 if name.startswith("constant") else 5
    settings = ScheduleSettings(
        name=name, warmup_updates=warmup, total_updates=total, arguments=arguments
    )

    schedule = Schedule(settings, learning_rate=1e-3)

    assert all(0 < schedule.learning_rate(update) <= 1e-3 for update in range(1, 9))


def test_arguments_that_a_schedule_does_not_take_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="schedule_arguments: linear refuses"):
        Schedule(_schedule("linear", arguments={"colour": 1}), learning_rate=1.0)
    for text in ("[1]", "{"):
        with pytest.raises(InvalidConfigError, match="schedule_arguments"):
            parse_arguments(text)


@pytest.mark.parametrize(
    ("kind", "values", "field"),
    [
        (ScheduleSettings, {"name": "wavy"}, "schedule"),
        (ScheduleSettings, {"name": "constant", "warmup_updates": 1}, "warmup_updates"),
        (
            ScheduleSettings,
            {"name": "cosine", "warmup_updates": 5, "total_updates": 5},
            "schedule_updates",
        ),
        *(
            (AdamSettings, {"learning_rate": 1.0, field: value}, field)
            for field, value in (
                *(("learning_rate", -1.0), ("learning_rate", math.nan), ("beta1", 1.0)),
                *(("beta2", -0.1), ("eps", 0.0), ("weight_decay", -0.1)),
                ("max_grad_norm", math.inf),
            )
        ),
    ],
)
def test_invalid_setting_is_refused_by_its_field(
    kind: type[Any], values: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        kind(**values)

    assert caught.value.field == field


def _schedule(name: str, **values: Any) -> ScheduleSettings:
    return ScheduleSettings(name=name, warmup_updates=2, total_updates=5, **values)


def _step_reference(
    weight: Tensor,
    moments: list[Tensor],
    gradient: Tensor,
    number: int,
    settings: AdamSettings,
    decay: float,
) -> None:
    """Apply one step of AdamW (arXiv:1711.05101, algorithm 2) in place.

    The bias correction has the betas of this step, as in torch.
    """
    first, second = moments
    first.mul_(settings.beta1).add_(gradient * (1 - settings.beta1))
    second.mul_(settings.beta2).add_(gradient.square() * (1 - settings.beta2))
    mean = first / (1 - settings.beta1**number)
    root = (second / (1 - settings.beta2**number)).sqrt() + settings.eps
    weight.mul_(1 - settings.learning_rate * decay).sub_(settings.learning_rate * mean / root)
