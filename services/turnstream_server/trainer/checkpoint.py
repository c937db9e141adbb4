"""Checkpoints and published weights on disk: complete folders of the newest few.

A checkpoint is a folder `step-<N>` of the weights in Hugging Face layout, the state of optimizer
and random numbers, and `checkpoint.json` with the recovery token. One rename creates it after all
of it is on disk, so a folder with that name is complete. A copy of such a folder may be partial:
`checkpoint.json` lists the files, and a checkpoint without one of them is ignored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from turnstream.types import RecoveryToken
from turnstream_server.failpoints import reach
from turnstream_server.models.folders import new_folder, remove_folder, remove_unfinished
from turnstream_server.trainer.engine import Engine

logger = logging.getLogger(__name__)

NUM_VERSIONS = 3
"""Published weights on disk. With 1, a generator could miss a version it was just notified of."""

_PREFIX = "step-"
_ABOUT = "checkpoint.json"
_STATE = "state.pt"


class Checkpoint(NamedTuple):
    """A complete checkpoint: a folder of weights, and their position in the run's history."""

    folder: Path
    token: RecoveryToken


class Checkpoints:
    """The checkpoints of one trainer; unfinished ones of a killed trainer are removed at first.

    Args:
        folder: receives a folder for each checkpoint.
        keep: number of complete checkpoints that `prune` keeps; at least 1.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep
        for name in remove_unfinished(folder):
            logger.warning("checkpoints: removed %s, which was not finished", folder / name)

    def newest(self) -> Checkpoint | None:
        """Return the complete checkpoint of the highest step; None if there is none."""
        return next(self._newest_first(), None)

    def save(self, engine: Engine, token: RecoveryToken) -> Checkpoint:
        """Write a checkpoint to disk and return it. Older ones stay until `prune`."""
        target = self._folder / f"{_PREFIX}{token.step:08d}"
        with new_folder(target) as written:
            engine.write_weights(written)
            torch.save({"engine": engine.state_dict(), "random": _random_state()}, written / _STATE)
            reach("checkpoint.after_weights")
            files = sorted(path.name for path in written.iterdir())
            about = {"step": token.step, "recovery_token": str(token), "files": files}
            (written / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
        return Checkpoint(folder=target, token=token)

    def restore(self, checkpoint: Checkpoint, engine: Engine) -> None:
        """Restore the state of engine and random numbers; the weights are loaded already."""
        device = engine.model.device
        state = torch.load(checkpoint.folder / _STATE, map_location=device, weights_only=True)
        engine.load_state_dict(state["engine"])
        _set_random_state(state["random"])

    def prune(self) -> None:
        """Remove all but the newest complete ones; call it after the newest is committed.

        Partial ones are removed once they are older than those.
        """
        kept = list(islice(self._newest_first(), self._keep))
        if len(kept) == self._keep:
            for folder in self._folder.glob(f"{_PREFIX}*"):
                if folder.name < kept[-1].folder.name:
                    remove_folder(folder)

    def _newest_first(self) -> Iterator[Checkpoint]:
        """Yield the complete checkpoints; log the partial ones."""
        for folder in sorted(self._folder.glob(f"{_PREFIX}*"), reverse=True):
            try:
                yield Checkpoint(folder=folder, token=_read_token(folder))
            except (OSError, ValueError, KeyError) as error:
                logger.warning("checkpoints: ignored %s, which is partial: %s", folder, error)


class WeightsFolder:
    """The weights that a trainer publishes for generators, a folder for each version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        remove_unfinished(self._folder)

    def publish(self, engine: Engine, *, version: int) -> str:
        """Write the weights of a version, remove the oldest, and return the new folder's URI."""
        target = self._folder / f"v{version}"
        with new_folder(target) as written:
            engine.write_weights(written)
        folders = sorted(self._folder.glob("v[0-9]*"), key=lambda folder: int(folder.name[1:]))
        for folder in folders[:-NUM_VERSIONS]:
            remove_folder(folder)
        return target.as_uri()


def _read_token(folder: Path) -> RecoveryToken:
    """Return the token of a complete checkpoint; OSError, ValueError or KeyError for others."""
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    names = {path.name for path in folder.iterdir() if path.stat().st_size}
    missing = sorted({*about["files"]} - names)
    if missing:
        raise ValueError(f"{', '.join(missing)} missing or empty")
    return RecoveryToken.parse(about["recovery_token"])


def _random_state() -> dict[str, Any]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": devices}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([device.cpu() for device in state["cuda"]])
