"""Checkpoints of a hosted model: durable ones, from which its log is run again, and saved ones.

A durable checkpoint is a folder `models/<model>/<number>-<random>` below the shared folder of the
workers, with weights and moments after the operation of that number. The log names the newest one.
The one before it is kept too: a store may lose its last second of writes in a power cut. All others
are removed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import redis

from turnstream.errors import BatchingError, RunNotFoundError
from turnstream.types.names import decode_name, file_name
from turnstream_server.engine.host import Host, Lockstep
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.core.scan import server_ms
from turnstream_server.models.folders import remove_folder
from turnstream_server.operations.checkpoints import (
    CheckpointKind,
    CheckpointPath,
    SavedCheckpoint,
    folder_of,
    read_checkpoint,
    read_shared,
    session_folder,
    write_checkpoint,
)
from turnstream_server.operations.contents import SaveExternal, SaveForSampler, SaveWeights
from turnstream_server.operations.keys import MODEL_ID, RequestId
from turnstream_server.operations.models import ModelRecord
from turnstream_server.operations.results import Answer, Result, decode_result, encode_result
from turnstream_server.operations.samplers import SamplerRecord, write_sampler

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


_MODEL_FIELDS = ("base_model", "lora_rank", "train_attn", "train_mlp", "train_unembed")
_KINDS: Final[dict[type, CheckpointKind]] = {
    SaveWeights: "weights",
    SaveForSampler: "sampler_weights",
    SaveExternal: "external_weights",
}
_ANSWERS: Final = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
"""The type of the answer to a save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """Writes checkpoints of models."""

    client: redis.Redis
    root: Path
    call: Lockstep

    def save(
        self,
        record: ModelRecord,
        number: int,
        content: SaveWeights | SaveForSampler | SaveExternal,
    ) -> Answer:
        """Save or export weights; BatchingError if the name is taken.

        The folder is written first, and then the record that names it. The same call may do so
        again. Weights for one sampling session have no record.
        """
        if isinstance(content, SaveForSampler) and content.sampling_session_seq_id is not None:
            sampler_id = self._save_for_session(record, content.sampling_session_seq_id)
            values = {"sampling_session_id": sampler_id, "path": None}
            return Answer({**values, "type": "save_weights_for_sampler"})
        path = CheckpointPath(record.model_id, _KINDS[type(content)], content.name)
        request_id = str(RequestId(record.model_id, number))
        is_replaced = isinstance(content, SaveWeights) and content.overwrite
        if not is_replaced and self._saved_by(record.owner, path) not in ("", request_id):
            raise BatchingError(f"name is {path.name!r}: there is a checkpoint {str(path)!r}")
        folder = self.root / folder_of(path)
        if isinstance(content, SaveExternal):
            sizes = self.call(Host.export, record, folder, recipients=content.recipients)
        else:
            is_whole = isinstance(content, SaveWeights)
            sizes = self.call(Host.save, record.model_id, folder, optimizer=is_whole, files={})
        failpoint("engine.after_save")
        now_ms, ttl_s = server_ms(self.client), content.ttl_seconds
        saved = SavedCheckpoint(
            path=path,
            request_id=request_id,
            **{field: getattr(record, field) for field in _MODEL_FIELDS},
            created_ms=now_ms,
            expires_ms=None if ttl_s is None else now_ms + ttl_s * 1000,
            size_bytes=sizes[0],
            user_metadata={} if isinstance(content, SaveExternal) else content.user_metadata,
        )
        write_checkpoint(self.client, record.owner, saved)
        return Answer({"path": str(path), "type": _ANSWERS[path.kind]})

    def loadable(self, record: ModelRecord, path: CheckpointPath) -> Path:
        """Return the folder of a checkpoint; BatchingError if the model cannot load it."""
        if path.kind != "weights":
            message = f"path is {str(path)!r}, which has no optimizer, expected .../weights/<name>"
            raise BatchingError(message)
        try:
            saved = read_shared(self.client, record.owner, path)
        except RunNotFoundError as error:
            raise BatchingError(f"path: {error}") from error
        for field in _MODEL_FIELDS:
            stored, own = getattr(saved, field), getattr(record, field)
            if stored != own:
                message = f"{field} of the checkpoint {str(path)!r} is {stored!r}, expected {own!r}"
                raise BatchingError(message)
        folder = self.root / folder_of(path)
        if not folder.is_dir():
            raise BatchingError(f"path: the files of the checkpoint {str(path)!r} are missing")
        return folder

    def _save_for_session(self, record: ModelRecord, number: int) -> str:
        folder = session_folder(record.model_id, number)
        self.call(Host.save, record.model_id, self.root / folder, optimizer=False, files={})
        match = MODEL_ID.fullmatch(record.model_id)
        assert match is not None
        sampler = SamplerRecord(
            sampler_id=f"{match['session']}:sample:{number}",
            base_model=record.base_model,
            owner=record.owner,
            folder=str(folder),
        )
        write_sampler(self.client, sampler)
        return sampler.sampler_id

    def _saved_by(self, owner: str, path: CheckpointPath) -> str:
        """Return the request id of the save of a checkpoint; "" if there is no checkpoint."""
        try:
            return read_checkpoint(self.client, owner, path).request_id
        except RunNotFoundError:
            return ""
