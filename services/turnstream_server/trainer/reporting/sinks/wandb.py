"""Metrics for wandb (Weights & Biases)."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from turnstream.errors import InvalidConfigError
from turnstream.optional import from_extra
from turnstream_server.trainer.reporting.declarations import BY_NAME, numbers

logger = logging.getLogger(__name__)

OPTION: Final = "--wandb"

_ID_FILE: Final = "wandb-id"


class Wandb:
    """Logs to one run of wandb, which a restart in the same folder resumes.

    The environment of wandb applies: `WANDB_MODE=offline` writes to the folder alone. The step of
    the trainer is the axis of the charts. A step that is trained again has a second point there;
    the summary has the later value.

    Args:
        project: in wandb.
        run: name of the run in wandb.
        folder: receives the files of wandb, and the id of its run.

    Raises:
        MissingExtraError: the package is not installed.
        InvalidConfigError: wandb refuses to start, such as without a login.
    """

    def __init__(self, project: str, *, run: str, folder: Path) -> None:
        with from_extra("wandb", needed_by=OPTION, distribution="turnstream-server"):
            import wandb

        try:
            self._run = wandb.init(
                project=project,
                name=run,
                id=_run_id(folder),
                resume="allow",
                dir=folder,
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise InvalidConfigError(OPTION, f"wandb does not start: {error}") from error
        logger.info("metrics go to wandb", extra={"id": self._run.id, "folder": str(folder)})
        self._run.define_metric("*", step_metric=BY_NAME["step"].tag)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log each number."""
        self._run.log({metric.tag: value for metric, value in numbers(metrics)})

    def close(self) -> None:
        """Send or write what is pending."""
        self._run.finish()


def _run_id(folder: Path) -> str:
    """Return the id in a folder; the first call makes one."""
    path = folder / _ID_FILE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(8), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
