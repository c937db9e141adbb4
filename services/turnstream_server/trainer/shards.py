"""Shards of weights and of the optimizer on disk, by torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from turnstream.errors import InvalidConfigError
from turnstream_server.trainer.optimizer import Optimizer


def write_shards(folder: Path, optimizer: Optimizer) -> None:
    """Write the shards of all ranks into an existing folder; all ranks call it."""
    save(optimizer.shards(), checkpoint_id=folder, no_dist=False)


def read_shards(folder: Path, optimizer: Optimizer) -> None:
    """Restore weights and moments from shards of any number of ranks; all ranks call it.

    Raises:
        InvalidConfigError: the shards are those of another model.
    """
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    sizes = {key: getattr(each, "size", None) for key, each in stored.items()}
    own = {key: each.shape for key, each in optimizer.shards().items() if key.startswith("weight/")}
    weights = {key: size for key, size in sizes.items() if key.startswith("weight/")}
    if weights != own:
        names = [key for key in sorted({*own, *weights}) if own.get(key) != weights.get(key)]
        _, name = names[0].split("/", 1)
        message = f"{name} is {own.get(names[0])}, and {weights.get(names[0])} in {folder}"
        raise InvalidConfigError("--policy", message)
    load(optimizer.make_shards(sizes), checkpoint_id=folder)
