"""Packages of sinks that only some installations have."""

from __future__ import annotations

import contextlib
import importlib
from typing import Final

from turnstream.optional import from_extra
from turnstream_server.trainer.config import TrainerConfig

_NEEDED_BY: Final = {"tensorboard": "--tensorboard", "wandb": "--wandb"}


def needs(package: str) -> contextlib.AbstractContextManager[None]:
    """Import a package inside the block; its extra has the same name.

    Raises:
        MissingExtraError: it is not installed; has the option, and the command that installs it.
    """
    return from_extra(package, needed_by=_NEEDED_BY[package], distribution="turnstream-server")


def require_packages(config: TrainerConfig) -> None:
    """Raise MissingExtraError if the package of a wanted sink is not installed."""
    wanted = {"tensorboard": config.tensorboard, "wandb": bool(config.wandb)}
    for package in (name for name, is_wanted in wanted.items() if is_wanted):
        with needs(package):
            importlib.import_module(package)
