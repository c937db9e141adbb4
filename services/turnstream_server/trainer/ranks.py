"""The data-parallel ranks of a trainer: processes with equal weights and a share of each batch.

`torchrun` starts the processes. Each one has the whole model and the whole optimizer. Gradients
travel over gloo on the CPU and over nccl on CUDA; all other values travel over gloo.

Gradients are summed once before each optimizer step, in a few flat buckets. DistributedDataParallel
does not fit here: it sums in the last backward pass before a step, and `forward_backward` cannot
know whether another call follows. It also averages. Here the loss of a rank has the denominators of
the whole mini-batch, so the plain sum is the gradient.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from turnstream.errors import InvalidConfigError
from turnstream.worker.launch import Launch

BUCKET_BYTES: Final = 64 << 20
"""Size of a bucket of gradients; a larger gradient has a bucket of its own."""

_COLLECTIVE_S: Final = 1800.0
"""Longest computation between two collective calls, in seconds."""

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One rank, and its calls to all ranks. Without arguments it is the only one.

    Every rank must make the same calls in the same order. A call raises RuntimeError if another
    rank has ended.

    Attributes:
        rank: number of this rank, from 0.
        world_size: number of ranks.
        device: torch device of this rank.
    """

    rank: int = 0
    world_size: int = 1
    device: str = "cpu"

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and announces weights."""
        return self.rank == 0

    def gather(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks in the order of the ranks; they must be picklable."""
        if self.world_size == 1:
            return [value]
        values: list[_Value | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return cast("list[_Value]", values)

    def broadcast(self, value: _Value) -> _Value:
        """Return the value of the first rank; it must be picklable."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        self.gather(None)

    def mesh(self) -> DeviceMesh:
        """Return the ranks as a mesh of one dimension, over which weights can be sharded."""
        if self.world_size == 1:
            message = "fsdp2, and this trainer has one rank: start several with torchrun"
            raise InvalidConfigError("--parallel", message)
        return init_device_mesh(torch.device(self.device).type, (self.world_size,))

    def sum_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Replace each gradient by the sum over all ranks, which is bit-equal on all of them.

        Sharded gradients are sums already. A rank without the gradient takes part with zeros. A
        parameter without a gradient on any rank keeps none.
        """
        if self.world_size == 1:
            return
        every = [each for each in parameters if not isinstance(each, DTensor)]
        if not every:
            return
        counts = torch.tensor([int(each.grad is not None) for each in every])
        dist.all_reduce(counts)
        gradients = [
            _gradient(each) for each, count in zip(every, counts.tolist(), strict=True) if count
        ]
        for bucket in buckets(gradients):
            _sum(bucket)

    def require_equal(self, parameters: Iterable[Parameter]) -> None:
        """Raise InvalidConfigError if the ranks do not have the same weights."""
        if self.world_size == 1:
            return
        own = [int(torch.hash_tensor(each.detach()).item()) for each in parameters]
        hashes = self.gather(own)
        other = [rank for rank, each in enumerate(hashes) if each != hashes[0]]
        if other:
            message = f"other weights on rank {other[0]} than on rank 0: share one folder"
            raise InvalidConfigError("--policy", message)


ONE_RANK: Final = Ranks()
"""The only rank of a trainer that is one process, on the CPU."""


@contextlib.contextmanager
def join_ranks(launch: Launch, *, timeout_s: float = 0.0) -> Iterator[Ranks]:
    """Yield the rank of this process; inside the block it is connected to all others.

    A single rank needs no torchrun and no connection. A rank of several takes the CUDA device of
    its LOCAL_RANK.

    Args:
        launch: rank and number of ranks; its session is new at each start.
        timeout_s: longest wait of a rank for data or for a server, in seconds. A longer wait for
            another rank is an error.

    Raises:
        InvalidConfigError: a variable of torchrun is missing, or this machine has fewer CUDA
            devices than ranks.
    """
    device = _device(launch)
    if launch.dp_world_size == 1:
        yield Ranks(device=device)
        return
    timeout = timedelta(seconds=_COLLECTIVE_S + timeout_s)
    try:
        store, rank, world_size = next(
            rendezvous("env://", launch.dp_rank, launch.dp_world_size, timeout=timeout)
        )
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            # torchrun keeps the store over a restart, with the addresses of the ended ranks.
            store=PrefixStore(launch.session, store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except ValueError as error:  # torch names a missing variable
        raise InvalidConfigError("torchrun", f"the ranks cannot connect: {error}") from error
    try:
        yield Ranks(rank=launch.dp_rank, world_size=launch.dp_world_size, device=device)
    finally:
        dist.destroy_process_group()


def buckets(tensors: Sequence[Tensor], *, num_bytes: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Yield consecutive tensors of one type, together at most `num_bytes` if more than one.

    >>> tensors = [torch.zeros(2), torch.zeros(1), torch.zeros(4)]
    >>> [len(bucket) for bucket in buckets(tensors, num_bytes=12)]
    [2, 1]
    """
    bucket: list[Tensor] = []
    for tensor in tensors:
        size = sum(each.nbytes for each in bucket) + tensor.nbytes
        if bucket and (size > num_bytes or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _device(launch: Launch) -> str:
    """Return the device of this process, and make it the current one if it is one of several."""
    if not torch.cuda.is_available():
        return "cpu"
    if launch.dp_world_size == 1:
        return "cuda"
    local_rank, num_devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= num_devices:
        raise InvalidConfigError("LOCAL_RANK", f"{local_rank}, with {num_devices} CUDA devices")
    torch.cuda.set_device(local_rank)
    return f"cuda:{local_rank}"


def _gradient(parameter: Parameter) -> Tensor:
    """Return the gradient of a parameter, which gets zeros if it has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


@torch.no_grad()
def _sum(bucket: Sequence[Tensor]) -> None:
    """Replace the values of tensors by the sums over all ranks, in one message."""
    flat = torch.cat([each.flatten() for each in bucket])
    dist.all_reduce(flat)
    parts = flat.split([each.numel() for each in bucket])
    for each, summed in zip(bucket, parts, strict=True):
        each.copy_(summed.view_as(each))
