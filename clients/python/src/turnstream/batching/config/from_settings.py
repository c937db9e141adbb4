"""Configurations from the names and values of settings."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Final

from turnstream.batching.config.batching_config import BatchingConfig
from turnstream.errors import InvalidConfigError

_NAMES: Final = tuple(field.name for field in dataclasses.fields(BatchingConfig))


def config_from_settings(settings: Mapping[str, Any]) -> BatchingConfig:
    """Return the configuration with these settings; the others have their default.

    An update takes all groups of a step unless `mini_batch_groups` is given.

    Raises:
        InvalidConfigError: names the setting that is unknown, missing, or cannot have its value.
    """
    _check_names(settings)
    if "batch_groups" not in settings:
        raise InvalidConfigError("batch_groups", "it is missing: the groups of one training step")
    return BatchingConfig(**{"mini_batch_groups": settings["batch_groups"], **settings})


def with_settings(config: BatchingConfig, settings: Mapping[str, Any]) -> BatchingConfig:
    """Return a configuration with other values of these settings; errors as above."""
    _check_names(settings)
    return dataclasses.replace(config, **settings)


def _check_names(settings: Mapping[str, Any]) -> None:
    for name in settings:
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidConfigError(name, f"it is no setting of a run{hint}")
