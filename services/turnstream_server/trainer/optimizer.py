"""AdamW whose settings may change at each step, and the schedule of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import get_scheduler

from turnstream.errors import InvalidConfigError
from turnstream_server.models.sharding import whole
from turnstream_server.trainer.metrics import StepReport
from turnstream_server.trainer.ranks import ONE_RANK, Ranks
from turnstream_server.trainer.settings import AdamSettings, ScheduleSettings

_NUM_NAMED: Final = 3
"""Parameters that a reason names at most."""


class Optimizer:
    """AdamW on named parameters. A step with a gradient that is not finite is skipped.

    All ranks have equal parameters, or a shard of each, and make equal steps.

    Attributes:
        num_steps: steps so far, with skipped ones and those before a restart.
        num_skipped: skipped ones of them.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, Parameter]], *, ranks: Ranks = ONE_RANK
    ) -> None:
        self.num_steps = 0
        self.num_skipped = 0
        self._ranks = ranks
        self._parameters = dict(parameters)
        decayed = [each for each in self._parameters.values() if each.dim() > 1]
        others = [each for each in self._parameters.values() if each.dim() <= 1]
        groups = [{"params": decayed, "decays": True}, {"params": others, "decays": False}]
        self._adamw = torch.optim.AdamW([group for group in groups if group["params"]])

    def clear(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def zero(self) -> None:
        """Set all gradients to zero."""
        for each in self._parameters.values():
            each.grad = torch.zeros_like(each)

    def has_finite_gradient(self) -> bool:
        """Return whether all gradients of this rank are finite; a shard counts for all ranks."""
        gradients = [each.grad for each in self._parameters.values() if each.grad is not None]
        largest = torch.nn.utils.get_total_norm(gradients, norm_type=math.inf)
        return math.isfinite(whole(largest).item())

    def step(self, settings: AdamSettings) -> StepReport:
        """Apply the sums of the gradients over all ranks if they are finite."""
        parameters = self._parameters.values()
        self._ranks.sum_gradients(parameters)
        gradients = [each.grad for each in parameters if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        whole_norm = whole(norm).item()
        reason = "" if math.isfinite(whole_norm) else self._reason(whole_norm)
        self.num_steps += 1
        if reason:
            self.num_skipped += 1
        else:
            if settings.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(parameters, settings.max_grad_norm, norm)
            self._apply(settings)
        return StepReport(
            gradient_norm=whole_norm, learning_rate=settings.learning_rate, skip_reason=reason
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the moments unless they are sharded."""
        counts = {"num_steps": self.num_steps, "num_skipped": self.num_skipped}
        return counts if self._is_sharded else {"adamw": self._adamw.state_dict(), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict()` for equal parameters."""
        if not self._is_sharded:
            self._adamw.load_state_dict(state["adamw"])
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]

    def shards(self) -> dict[str, Tensor]:
        """Return the weights, and the moments so far, by `<kind>/<name of the weight>`."""
        tensors = {f"weight/{name}": each.detach() for name, each in self._parameters.items()}
        for name, parameter in self._parameters.items():
            state = cast("dict[str, Tensor]", self._adamw.state.get(parameter, {}))
            tensors |= {f"{kind}/{name}": value for kind, value in state.items()}
        return tensors

    def make_shards(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors of `shards()` with these keys; values written to them are used."""
        tensors: dict[str, Tensor] = {}
        for key in keys:
            kind, name = key.split("/", 1)
            parameter = self._parameters[name]
            if kind == "weight":
                tensors[key] = parameter.detach()
                continue
            zeros = torch.zeros(()) if kind == "step" else torch.zeros_like(parameter.detach())
            self._adamw.state[parameter][kind] = tensors[key] = zeros
        return tensors

    @property
    def _is_sharded(self) -> bool:
        return any(isinstance(each, DTensor) for each in self._parameters.values())

    def _apply(self, settings: AdamSettings) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = settings.learning_rate
            group["betas"] = (settings.beta1, settings.beta2)
            group["eps"] = settings.eps
            group["weight_decay"] = settings.weight_decay if group["decays"] else 0.0
        self._adamw.step()

    def _reason(self, norm: float) -> str:
        """Return the parameters that made a gradient norm infinite or NaN."""
        bad = [name for name, each in self._parameters.items() if _has_bad_gradient(each)]
        if not bad:
            return f"gradient norm is {norm}: it exceeds float32"
        named = ", ".join([*bad[:_NUM_NAMED], *(["..."] if len(bad) > _NUM_NAMED else [])])
        return f"gradient norm is {norm}: {len(bad)} of {len(self._parameters)} weights ({named})"


class Schedule:
    """Learning rate of each update.

    Update u of U has the factor that transformers computes at its step u of U + 1. So neither the
    first update nor the last one has the rate 0. Updates after the last one keep its rate.
    """

    def __init__(self, settings: ScheduleSettings, *, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        self._last = settings.total_updates or None
        self._factor = _factor(settings, learning_rate)

    def learning_rate(self, update: int) -> float:
        """Return the rate of an update, counted from 1."""
        last = update if self._last is None else min(update, self._last)
        return self._learning_rate * self._factor(last)


def _factor(settings: ScheduleSettings, learning_rate: float) -> Callable[[int], float]:
    """Return transformers' function from a step to a factor of the learning rate."""
    unused = torch.optim.SGD([torch.zeros(1)], lr=learning_rate)
    try:
        scheduler = get_scheduler(
            settings.name,
            optimizer=unused,
            num_warmup_steps=settings.warmup_updates,
            num_training_steps=settings.total_updates + 1,
            scheduler_specific_kwargs=dict(settings.arguments),
        )
    except (TypeError, ValueError) as error:
        message = f"{settings.name} refuses {dict(settings.arguments)}: {error}"
        raise InvalidConfigError("schedule_arguments", message) from error
    return cast(Callable[[int], float], cast(Any, scheduler).lr_lambdas[0])


def _has_bad_gradient(parameter: Parameter) -> bool:
    return parameter.grad is not None and not bool(whole(parameter.grad.isfinite().all()))
