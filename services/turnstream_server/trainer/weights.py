"""Published weights on disk: one folder for each version, the newest few kept."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from turnstream_server.models.folders import remove_folder, remove_unfinished
from turnstream_server.models.policy import save_policy

_PREFIX = "v"


class PublishedWeights(NamedTuple):
    """Weights that generators can load: a folder in Hugging Face layout, as a file URI."""

    version: int
    uri: str


class WeightsFolder:
    """The folder in which a trainer leaves its weights for generators.

    Args:
        folder: of the versions; made when the first one is published.
        num_retained: how many of the newest stay. With one alone, a generator could find the
            version gone that it has just been told of.
    """

    def __init__(self, folder: Path, *, num_retained: int) -> None:
        self._folder = folder.resolve()
        self._num_retained = num_retained

    def clean(self) -> None:
        """Remove what an earlier trainer, killed while it was writing, left in the folder."""
        remove_unfinished(self._folder)

    def publish(self, model: PreTrainedModel, *, version: int) -> PublishedWeights:
        """Write the weights of a version, and remove the oldest ones."""
        target = self._folder / f"{_PREFIX}{version}"
        save_policy(model, target)
        for folder in self._by_version()[: -self._num_retained]:
            remove_folder(folder)
        return PublishedWeights(version=version, uri=target.as_uri())

    def _by_version(self) -> list[Path]:
        return sorted(
            self._folder.glob(f"{_PREFIX}[0-9]*"), key=lambda folder: int(folder.name[1:])
        )
