"""Checkpoints and published weights on disk: complete folders of the newest few.

A checkpoint is a folder `step-<N>` with the weights in Hugging Face layout, the optimizer and the
random numbers of each rank. Its `checkpoint.json` has the recovery token. One rename creates the
folder after all of it is on disk, so a folder with that name is complete. A copy may be partial:
`checkpoint.json` lists the files, and a checkpoint without one of them is ignored.

If the model is sharded, each rank writes its shards of weights and optimizer into that folder, in
the layout of torch.distributed.checkpoint. Any number of ranks can read them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from turnstream.errors import InvalidConfigError, UnknownFormatError
from turnstream.records.encoding import check_format
from turnstream.types import RecoveryToken
from turnstream_server.failpoints import failpoint
from turnstream_server.models.folders import new_folder, remove_folder, remove_unfinished
from turnstream_server.trainer.engine import Engine, WriteWeights
from turnstream_server.trainer.optimizer import Optimizer
from turnstream_server.trainer.ranks import ONE_RANK, Ranks

logger = logging.getLogger(__name__)

NUM_VERSIONS = 3
"""Published weights on disk. With 1, a generator could miss a version it was just notified of."""

_FORMAT = 1
"""Format of the files of a checkpoint. Format 0 has no list of files."""

_PREFIX = "step-"
_ABOUT = "checkpoint.json"
_STATE = "state.pt"


class Checkpoint(NamedTuple):
    """A complete checkpoint: a folder of weights, and their position in the run's history.

    Attributes:
        is_sharded: the weights are shards, and not a model in Hugging Face layout.
    """

    folder: Path
    token: RecoveryToken
    is_sharded: bool = False


class Checkpoints:
    """The checkpoints of one trainer; unfinished ones of a killed trainer are removed at first.

    All ranks make all calls. The first rank alone writes and removes, except for shards.

    Args:
        folder: receives a folder for each checkpoint. All ranks must be able to read it.
        keep: number of complete checkpoints that `prune` keeps; at least 1.
        ranks: those of the trainer.
    """

    def __init__(self, folder: Path, *, keep: int = 2, ranks: Ranks = ONE_RANK) -> None:
        self._folder = folder
        self._keep = keep
        self._ranks = ranks
        for name in remove_unfinished(folder) if ranks.is_first else []:
            logger.warning("checkpoints: removed %s, which was not finished", folder / name)

    def newest(self) -> Checkpoint | None:
        """Return the complete checkpoint of the highest step; None if there is none.

        All ranks get the one that the first rank has found.

        Raises:
            UnknownFormatError: another release wrote it.
        """
        found = next(self._newest_first(), None) if self._ranks.is_first else None
        return self._ranks.broadcast(found)

    def save(self, engine: Engine, token: RecoveryToken) -> Checkpoint:
        """Write a checkpoint and return it; on every rank, it is on disk then.

        Older ones stay until `prune`.
        """
        target = self._folder / f"{_PREFIX}{token.step:08d}"
        random_states = self._ranks.gather(_random_state())
        with self._shared_folder(target) as written:
            if engine.is_sharded:
                _write_shards(written, engine.optimizers)
                failpoint("checkpoint.after_shards")
            if self._ranks.is_first:
                _write(written, engine, token, random_states)
        return Checkpoint(folder=target, token=token, is_sharded=engine.is_sharded)

    def restore(self, checkpoint: Checkpoint, engine: Engine) -> None:
        """Restore the state of engine and random numbers; the weights are loaded already.

        A rank that the checkpoint does not have keeps its random numbers.
        """
        device = engine.model.device
        state = torch.load(checkpoint.folder / _STATE, map_location=device, weights_only=True)
        if checkpoint.is_sharded:
            _read_shards(checkpoint.folder, engine.optimizers)
        engine.load_state_dict(state["engine"])
        if self._ranks.rank < len(state["random"]):
            _set_random_state(state["random"][self._ranks.rank])

    def prune(self) -> None:
        """Remove all but the newest complete ones; call it after the newest is committed.

        Nothing is removed before all ranks have called. Partial ones are removed once they are
        older than those.
        """
        self._ranks.barrier()
        if not self._ranks.is_first:
            return
        kept = list(islice(self._newest_first(), self._keep))
        if len(kept) == self._keep:
            for folder in self._folder.glob(f"{_PREFIX}*"):
                if folder.name < kept[-1].folder.name:
                    remove_folder(folder)

    @contextmanager
    def _shared_folder(self, target: Path) -> Iterator[Path]:
        """Yield a new folder to all ranks; it becomes `target` once all have left the block."""
        if not self._ranks.is_first:
            yield self._ranks.broadcast(Path())
            self._ranks.barrier()
        else:
            with new_folder(target) as written:
                yield self._ranks.broadcast(written)
                self._ranks.barrier()
        self._ranks.barrier()

    def _newest_first(self) -> Iterator[Checkpoint]:
        for folder in sorted(self._folder.glob(f"{_PREFIX}*"), reverse=True):
            try:
                yield _read(folder)
            except UnknownFormatError:
                raise
            except (OSError, ValueError, KeyError) as error:
                logger.warning("checkpoints: ignored %s, which is partial: %s", folder, error)


def publish_weights(folder: Path, write: WriteWeights, *, version: int) -> str:
    """Write the weights of a version, remove the oldest, and return the new folder's URI."""
    target = folder.resolve() / f"v{version}"
    with new_folder(target) as written:
        write(written)
    folders = sorted(target.parent.glob("v[0-9]*"), key=lambda folder: int(folder.name[1:]))
    for old in folders[:-NUM_VERSIONS]:
        remove_folder(old)
    return target.as_uri()


def _write(
    folder: Path, engine: Engine, token: RecoveryToken, random_states: list[dict[str, Any]]
) -> None:
    if not engine.is_sharded:
        engine.gather_weights()(folder)
    torch.save({"engine": engine.state_dict(), "random": random_states}, folder / _STATE)
    failpoint("checkpoint.after_weights")
    about = {
        "format": _FORMAT,
        "step": token.step,
        "recovery_token": str(token),
        "is_sharded": engine.is_sharded,
        "files": sorted(path.name for path in folder.iterdir()),
    }
    (folder / _ABOUT).write_text(json.dumps(about), encoding="utf-8")


def _read(folder: Path) -> Checkpoint:
    """Return a complete checkpoint; OSError, ValueError or KeyError for others."""
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    check_format(f"checkpoint {folder}", about.get("format", 0), newest=_FORMAT, oldest=_FORMAT)
    names = {path.name for path in folder.iterdir() if path.stat().st_size}
    missing = sorted({*about["files"]} - names)
    if missing:
        raise ValueError(f"{', '.join(missing)} missing or empty")
    token = RecoveryToken.parse(about["recovery_token"])
    return Checkpoint(folder=folder, token=token, is_sharded=about.get("is_sharded", False))


def _random_state() -> dict[str, Any]:
    """Return the state on the CPU, and on the current CUDA device."""
    devices = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": devices}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0].cpu())


def _write_shards(folder: Path, optimizers: Mapping[str, Optimizer]) -> None:
    """Write the shards of all ranks into an existing folder; all ranks call it."""
    shards = {owner: each.shards() for owner, each in optimizers.items()}
    save(_named(shards), checkpoint_id=folder, no_dist=False)


def _read_shards(folder: Path, optimizers: Mapping[str, Optimizer]) -> None:
    """Restore weights and moments from shards of any number of ranks; all ranks call it."""
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
