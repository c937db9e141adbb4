"""Shards of weights and of optimizers on disk, by torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from turnstream.errors import InvalidConfigError
from turnstream_server.trainer.optimizer import Optimizer


def write_shards(folder: Path, optimizers: Mapping[str, Optimizer]) -> None:
    """Write the shards of all ranks into an existing folder; all ranks call it."""
    shards = {owner: each.shards() for owner, each in optimizers.items()}
    save(_named(shards), checkpoint_id=folder, no_dist=False)


def read_shards(folder: Path, optimizers: Mapping[str, Optimizer]) -> None:
    """Restore weights and moments from shards of any number of ranks; all ranks call it.

    Raises:
        InvalidConfigError: the shards are those of other models.
    """
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    _require_equal(folder, optimizers, stored)
    shards = {
        owner: each.make_shards(_keys(stored, owner=owner)) for owner, each in optimizers.items()
    }
    load(_named(shards), checkpoint_id=folder)


def _named(shards: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{owner}/{key}": each for owner, own in shards.items() for key, each in own.items()}


def _keys(names: Iterable[str], *, owner: str) -> list[str]:
    """Return the keys of one optimizer.

    >>> _keys(["critic/step/head.bias", "policy/step/norm.weight"], owner="critic")
    ['step/head.bias']
    """
    return [name.removeprefix(f"{owner}/") for name in names if name.startswith(f"{owner}/")]


def _require_equal(
    folder: Path, optimizers: Mapping[str, Optimizer], stored: Mapping[str, Any]
) -> None:
    for owner, optimizer in optimizers.items():
        own = {key: each.shape for key, each in optimizer.shards().items() if _is_weight(key)}
        found = {
            key: stored[f"{owner}/{key}"].size
            for key in _keys(stored, owner=owner)
            if _is_weight(key)
        }
        for key in sorted({*own, *found}):
            if own.get(key) != found.get(key):
                name = key.removeprefix("weight/")
                message = f"{name} is {own.get(key)}, and {found.get(key)} in {folder}"
                option = "--policy" if owner == "policy" else "--critic"
                raise InvalidConfigError(option, message)


def _is_weight(key: str) -> bool:
    return key.startswith("weight/")
