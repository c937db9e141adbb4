"""Durable checkpoints of a hosted model: the state from which its log is run again.

Each is a folder `models/<model>/<number>-<random>` below the shared folder of the workers, with
weights and moments after the operation of that number. The log names the newest one. The one before
it is kept too: a store may lose its last second of writes in a power cut. All others are removed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from turnstream.types.names import decode_name, file_name
from turnstream_server.models.folders import remove_folder
from turnstream_server.operations.checkpoints import session_folder
from turnstream_server.operations.keys import MODEL_ID
from turnstream_server.operations.results import Result, decode_result, encode_result

_MODELS: Final = "models"
_RESULT: Final = "result"
_RUNS: Final = "runs.json"


class RunPosition(NamedTuple):
    """The position of a model in a run that it trains on.

    Attributes:
        token: recovery token of the newest step that was applied; "" before the first.
        num_taken: mini-batches of the step after it that were taken.
        lost: the reason why the model cannot train the run any more; "" if it can.
    """

    token: str = ""
    num_taken: int = 0
    lost: str = ""


class DurableFolders:
    """The durable checkpoints of one model, below the shared folder of the workers."""

    def __init__(self, root: Path, model_id: str) -> None:
        self._folder = root / _MODELS / file_name(model_id)

    def new_name(self, number: int) -> str:
        """Return a name for a new checkpoint: no worker replaces the folder of another one."""
        return f"{number:08d}-{uuid.uuid4().hex[:8]}"

    def path(self, name: str) -> Path:
        """Return the folder of a checkpoint."""
        return self._folder / name

    def keep_only(self, *names: str) -> None:
        """Remove all folders but those of some checkpoints."""
        for folder in [*self._folder.glob("*")]:
            if folder.name not in names:
                remove_folder(folder)

    def remove(self) -> None:
        """Remove all checkpoints."""
        remove_folder(self._folder)

    def result(self, name: str) -> Result | None:
        """Return the result of the operation whose effect a checkpoint holds, if it is known."""
        file = self.path(name) / _RESULT
        return decode_result(file.read_bytes()) if file.is_file() else None

    def positions(self, name: str) -> dict[str, RunPosition]:
        """Return the position in each run that a checkpoint holds, by its id."""
        file = self.path(name) / _RUNS
        stored = json.loads(file.read_bytes()) if file.is_file() else {}
        return {run: RunPosition(**fields) for run, fields in stored.items()}


def further_files(result: Result | None, positions: Mapping[str, RunPosition]) -> dict[str, bytes]:
    """Return the files of a checkpoint with the result of its operation, and positions in runs."""
    files = {} if result is None else {_RESULT: encode_result(result)}
    if positions:
        stored = {run: each._asdict() for run, each in positions.items()}
        files[_RUNS] = json.dumps(stored, sort_keys=True).encode()
    return files


def durable_models(root: Path) -> list[str]:
    """Return the ids of the models with durable checkpoints."""
    found = (decode_name(each.name) for each in (root / _MODELS).glob("*"))
    return sorted(each for each in found if MODEL_ID.fullmatch(each))


def remove_session_files(root: Path, model_id: str) -> None:
    """Remove durable checkpoints and weights of sampling sessions of a model that has ended."""
    with contextlib.suppress(FileNotFoundError):  # another worker removes them too
        DurableFolders(root, model_id).remove()
        shutil.rmtree((root / session_folder(model_id, 0)).parent, ignore_errors=True)
