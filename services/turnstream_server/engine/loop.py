"""The loop of a worker's first rank: models take turns. The other ranks follow its calls.

Leases are renewed by a thread of their own, because a device pass may take minutes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import redis

from turnstream.errors import (
    EndOfRunError,
    FencedError,
    NotReadyError,
    RejectedError,
    RunNotFoundError,
    UnavailableError,
)
from turnstream_server.engine.checkpoints import durable_models, remove_session_files
from turnstream_server.engine.host import Host, Lockstep
from turnstream_server.engine.hosted_model import HostedModel
from turnstream_server.engine.options import EngineOptions
from turnstream_server.models.folders import remove_folder
from turnstream_server.operations.announcing import Wakeups
from turnstream_server.operations.checkpoints import CheckpointPath, due_folders, folder_removed
from turnstream_server.operations.models import BaseModel, models_of_base, read_model, register_base

logger = logging.getLogger(__name__)

_RENEW_S: Final = 4.0
_REGISTER_EVERY: Final = 2
"""Renewals between two registrations of the base models, which last 30 s."""


class Leases:
    """Renews leases, and the registrations of base models, in a daemon thread."""

    def __init__(self, client: redis.Redis, bases: Sequence[BaseModel]) -> None:
        self._client = client
        self._bases = bases
        self._held: dict[str, Callable[[], None]] = {}
        self._ended: dict[str, RejectedError] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def __enter__(self) -> Leases:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def hold(self, name: str, renew: Callable[[], None]) -> None:
        """Renew a lease from now on, by a call that raises RejectedError once it has ended."""
        self._held[name] = renew

    def drop(self, name: str) -> None:
        """Stop renewing a lease."""
        self._held.pop(name, None)
        self._ended.pop(name, None)

    def ended(self) -> dict[str, RejectedError]:
        """Return the error of each lease that has ended, at its name, until it is dropped."""
        return dict(self._ended)

    def _run(self) -> None:
        count = 0
        while True:
            try:
                if count % _REGISTER_EVERY == 0:
                    for base in self._bases:
                        register_base(self._client, base)
                self._renew()
            except UnavailableError as error:
                logger.warning("leases are not renewed: %s", error)
            except Exception:
                logger.exception("leases are not renewed")
            count += 1
            if self._stopped.wait(_RENEW_S):
                return

    def _renew(self) -> None:
        for name, renew in [*self._held.items()]:
            try:
                renew()
            except RejectedError as error:
                if name in self._held:
                    self._ended[name] = error


_BLOCK_S: Final = 0.5
_SCAN_S: Final = 1.0
_SWEEP_S: Final = 10.0
_BEAT_S: Final = 60.0
"""Ranks without a call for half an hour would end."""

_PAUSE_S: Final = 1.0
"""Pause of a model after an error of the store or a batcher."""


class EngineLoop:
    """Runs the operations of all models of some base models.

    Owners take turns, and so do the models of an owner. A turn is one forward pass of a training
    call, or one other operation.
    """

    def __init__(
        self,
        client: redis.Redis,
        bases: Sequence[BaseModel],
        *,
        call: Lockstep,
        options: EngineOptions,
    ) -> None:
        self._client = client
        self._bases = [each.name for each in bases]
        self._root = options.folder
        self._call = call
        self._options = options
        self._wakeups = Wakeups(client)
        self._leases = Leases(client, bases)
        self._models: dict[str, HostedModel] = {}
        self._ready: dict[str, None] = {}
        self._not_before_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}

    def models(self) -> list[str]:
        """Return the ids of the models of this worker; safe to call from another thread."""
        return [*self._models]

    def run(self, is_stopping: Callable[[], bool]) -> None:
        """Run operations until `is_stopping`, which is called between two turns."""
        with self._leases:
            while not is_stopping():
                try:
                    self._listen()
                    self._look_around()
                except UnavailableError as error:
                    logger.warning("the store is away: %s", error)
                    time.sleep(_BLOCK_S)
                    continue
                self._take_turns(is_stopping)
            self._stop()

    def _take_turns(self, is_stopping: Callable[[], bool]) -> None:
        """Give a turn to one model of each owner: the first that has anything to run."""
        served: set[str] = set()
        for model_id in [*self._ready]:
            owner = self._models[model_id].record.owner
            if owner not in served and not is_stopping() and self._advance(model_id):
                served.add(owner)

    def _listen(self) -> None:
        woken = self._wakeups.read(block_s=0.0 if self._ready else _BLOCK_S)
        for model_id in woken:
            if model_id not in self._models:
                self._due_s.pop("scan", None)
            elif time.monotonic() >= self._not_before_s.get(model_id, 0.0):
                self._ready[model_id] = None

    def _look_around(self) -> None:
        for model_id, error in self._leases.ended().items():
            self._unload(model_id, error)
        if self._is_due("scan", every_s=_SCAN_S):
            self._scan()
        if self._is_due("sweep", every_s=_SWEEP_S):
            remove_due(self._client, self._root, is_held=self._models.__contains__)
            _remove_ended(self._client, self._root, bases=self._bases)
        if self._is_due("beat", every_s=_BEAT_S):
            self._call(Host.nothing)

    def _scan(self) -> None:
        """Make all models ready, with new ones: a notification may have been lost."""
        open_models = [each for base in self._bases for each in models_of_base(self._client, base)]
        for model_id in open_models:
            with contextlib.suppress(RunNotFoundError):  # it is listed before it is created
                if time.monotonic() >= self._not_before_s.get(model_id, 0.0):
                    if model_id not in self._models:
                        self._models[model_id] = self._model(model_id)
                    self._ready[model_id] = None

    def _model(self, model_id: str) -> HostedModel:
        record = read_model(self._client, model_id)
        return HostedModel(self._client, record, call=self._call, options=self._options)

    def _advance(self, model_id: str) -> bool:
        """Give a model a turn, and return whether it has used it; then it is the last in turn."""
        model = self._models[model_id]
        self._leases.hold(model_id, model.renew)
        try:
            has_run = model.advance()
        except NotReadyError as error:  # generators may take minutes for a batch
            logger.debug("model %s waits: %s", model_id, error)
            self._pause(model_id, _PAUSE_S)
        except UnavailableError as error:
            logger.warning("model %s waits: %s", model_id, error)
            self._pause(model_id, _PAUSE_S)
        except RejectedError as error:
            self._unload(model_id, error)
        except Exception as error:
            logger.exception("model %s", model_id)
            self._unload(model_id, RejectedError(str(error), _PAUSE_S))
        else:
            del self._ready[model_id]
            if has_run:
                self._ready[model_id] = None
            return has_run
        return True

    def _pause(self, model_id: str, pause_s: float) -> None:
        self._ready.pop(model_id, None)
        self._not_before_s[model_id] = time.monotonic() + pause_s

    def _unload(self, model_id: str, error: RejectedError) -> None:
        """Free a model that this worker does not run any more, or cannot run now."""
        self._leases.drop(model_id)
        self._pause(model_id, error.retry_after_s or _PAUSE_S)
        model = self._models.pop(model_id, None)
        if model is None:
            return
        model.unload()
        if isinstance(error, EndOfRunError):
            remove_session_files(self._root, model_id)
            self._not_before_s.pop(model_id, None)
        if isinstance(error, EndOfRunError | FencedError):
            logger.info("model %s is unloaded: %s", model_id, error)

    def _stop(self) -> None:
        for model_id, model in self._models.items():
            self._leases.drop(model_id)
            try:
                model.stop()
            except (RejectedError, UnavailableError, OSError) as error:
                logger.warning("model %s: %s", model_id, error)

    def _is_due(self, name: str, *, every_s: float) -> bool:
        now_s = time.monotonic()
        if now_s < self._due_s.get(name, 0.0):
            return False
        self._due_s[name] = now_s + every_s
        return True


def remove_due(client: redis.Redis, root: Path, *, is_held: Callable[[str], bool]) -> None:
    """Remove the folders of deleted and expired checkpoints.

    A model may save under the same name at the same time. So folders of a model in an open session
    are removed by its worker alone.
    """
    for entry, folder in due_folders(client):
        path = CheckpointPath.parse(entry.partition(" ")[2])
        if not is_held(path.model_id) and not _has_ended(client, path.model_id):
            continue
        with contextlib.suppress(FileNotFoundError):  # another worker removes it too
            remove_folder(root / folder)
        folder_removed(client, entry)
        logger.info("removed checkpoint %s", path)


def _remove_ended(client: redis.Redis, root: Path, *, bases: Collection[str]) -> None:
    """Remove the files of models that have ended while no worker ran them."""
    for model_id in durable_models(root):
        # An emptied store has no records. The files of its models are kept.
        with contextlib.suppress(RunNotFoundError):
            record = read_model(client, model_id)
            if record.ended and record.base_model in bases:
                remove_session_files(root, model_id)


def _has_ended(client: redis.Redis, model_id: str) -> bool:
    try:
        return bool(read_model(client, model_id).ended)
    except RunNotFoundError:
        return True
