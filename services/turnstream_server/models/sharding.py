"""Models whose weights are sharded over ranks, by torch's `fully_shard` (FSDP2).

Each rank stores a shard of each weight, as a DTensor. A layer gathers its weights for its pass and
drops them after it. The backward pass leaves the sums of the gradients over all ranks, in shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from turnstream.errors import InvalidConfigError

_METHOD: Final = "_turnstream_pass"

_Value = TypeVar("_Value")


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the weights of a model over a mesh of one dimension; all ranks call it.

    It is a model of transformers, or has one.

    All ranks have equal weights before. After it they make equal numbers of passes, in one order.

    Raises:
        InvalidConfigError: torch cannot shard a weight.
    """
    types = _layer_types(model)
    layers = [each for each in model.modules() if type(each).__name__ in types]
    for module in [*reversed(layers), model]:  # inner layers before the outer ones
        try:
            # The root too: weights that stay whole after a pass would miss the next update.
            sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        except ValueError as error:
            raise InvalidConfigError("--parallel", f"fsdp2 cannot shard it: {error}") from error
        # The loss of a rank has the denominators of all ranks, so a mean would be too small.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(enable=True)  # gloo has no scaled sums
    cast(FSDPModule, model).set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)
    setattr(model, _METHOD, lambda compute: compute())
    register_fsdp_forward_method(model, _METHOD)


def one_pass(model: nn.Module, compute: Callable[[], _Value]) -> _Value:
    """Return `compute()`, one forward pass, with weights that belong to no layer gathered."""
    run: Callable[[Callable[[], _Value]], _Value] | None = getattr(model, _METHOD, None)
    return compute() if run is None else run(compute)


def is_sharded(model: nn.Module) -> bool:
    """Return whether the weights are sharded."""
    return isinstance(model, FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; if it is sharded, all ranks call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_weights(
    named: Iterable[tuple[str, Tensor]], *, only_rank: int | None = None
) -> dict[str, Tensor]:
    """Return whole copies of weights on the CPU, or on one rank alone; all ranks call it."""
    wanted = only_rank is None or dist.get_rank() == only_rank
    copies: dict[str, Tensor] = {}
    for name, weight in named:
        gathered = whole(weight.detach())
        if wanted:
            copies[name] = gathered.cpu()
    return copies


def whole_state(model: nn.Module, *, only_rank: int) -> dict[str, Tensor]:
    """Return whole copies of the stored values of a model on one rank; all ranks call it.

    A tied weight has its first name alone, as in a folder of weights.
    """
    weights = dict(model.named_parameters())
    others = {name for name, _ in model.named_parameters(remove_duplicate=False)} - weights.keys()
    stored = model.state_dict().items()
    kept = ((name, each) for name, each in stored if name not in others)
    return whole_weights(kept, only_rank=only_rank)


def _layer_types(model: nn.Module) -> set[str]:
    """Return the names of the classes that transformers keeps on one device: the layers."""
    known = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    return {name for each in known for name in cast(Any, each)._no_split_modules or ()}
