"""The newest weights that the trainer of a run has announced."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import redis
from transformers import PreTrainedModel

from turnstream.errors import InvalidConfigError, NotReadyError
from turnstream.store.run.runs import newest_version
from turnstream.types import VersionAnnounced
from turnstream_server.models.policy import load_policy

logger = logging.getLogger(__name__)

_POLL_S = 0.2


class NewestPolicy:
    """A model that can be updated.

    Attributes:
        model: in evaluation mode, with the weights named `version`.
        version: -1 before the first weights.
    """

    model: PreTrainedModel

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.version = -1
        self._client = client
        self._run = run

    async def wait_for_first(self, *, timeout_s: float) -> None:
        """Load the first weights; NotReadyError if none are announced within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            await asyncio.to_thread(self.refresh)
            if self.version >= 0:
                return
            if time.monotonic() >= deadline_s:
                raise NotReadyError(f"run {self._run!r}: no weights within {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)

    def refresh(self) -> None:
        """Load newer weights, if any. Blocks; InvalidConfigError if they cannot be loaded."""
        while True:
            announced = newest_version(self._client, self._run)
            if announced is None or announced.version <= self.version:
                return
            try:
                self.model = load_policy(weights_folder(announced))
            except InvalidConfigError:
                # The trainer keeps only the newest few: these may be deleted.
                newest = newest_version(self._client, self._run)
                if newest is None or newest.version == announced.version:
                    raise
                continue
            self.version = announced.version
            logger.debug("loaded weights %d", self.version)


def weights_folder(announced: VersionAnnounced) -> Path:
    """Return the folder of announced weights; InvalidConfigError for another kind of address."""
    parsed = urlparse(announced.weights_uri)
    if parsed.scheme != "file":
        raise InvalidConfigError(
            "weights_uri",
            f"version {announced.version} has {announced.weights_uri!r}, which is no file URI",
        )
    return Path(url2pathname(parsed.path))
