"""Removal of folders that no operation needs any more."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from pathlib import Path

import redis

from turnstream.errors import RunNotFoundError
from turnstream_server.engine.durable import durable_models, remove_session_files
from turnstream_server.models.folders import remove_folder
from turnstream_server.operations.checkpoint_paths import CheckpointPath
from turnstream_server.operations.checkpoints import due_folders, folder_removed
from turnstream_server.operations.models import read_model

logger = logging.getLogger(__name__)


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


def remove_ended(client: redis.Redis, root: Path, *, bases: Collection[str]) -> None:
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
