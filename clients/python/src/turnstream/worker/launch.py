"""The rank of this process in its trainer, from the environment of torchrun."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from turnstream.errors import InvalidConfigError


class Launch(NamedTuple):
    """One process of a trainer; `session` names this start on all ranks, and is "" for one rank."""

    dp_rank: int
    dp_world_size: int
    session: str


def find_launch(
    dp_rank: int | None = None,
    dp_world_size: int | None = None,
    session: str | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
) -> Launch:
    """Return the arguments, with torchrun's environment (RANK, WORLD_SIZE) in place of None.

    On one node the session name is made of the launcher's process. On several nodes it is made of
    TORCHELASTIC_RUN_ID, which must then be new at each start: `torchrun --rdzv-id`.

    Raises:
        InvalidConfigError: a variable is no number, or a start on several nodes has no name.

    >>> find_launch(environment={})
    Launch(dp_rank=0, dp_world_size=1, session='')
    >>> find_launch(1, 2, "start-7", environment={"RANK": "5"})
    Launch(dp_rank=1, dp_world_size=2, session='start-7')
    """
    rank = _number(environment, "RANK", 0) if dp_rank is None else dp_rank
    size = _number(environment, "WORLD_SIZE", 1) if dp_world_size is None else dp_world_size
    if session is None and size > 1:
        session = _session(environment)
    return Launch(rank, size, session or "")


def _session(environment: Mapping[str, str]) -> str:
    """Return a name that all ranks of this start share, and no other start has."""
    restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    run_id = environment.get("TORCHELASTIC_RUN_ID", "none")
    parts = (run_id, restart)
    if environment.get("LOCAL_WORLD_SIZE", "") == environment.get("WORLD_SIZE", "?"):
        parts = (socket.gethostname(), _launcher(), *parts)
    elif run_id == "none":
        raise InvalidConfigError(
            "session",
            "several ranks need a name in common that is new at each start: give `session`, or "
            "start them with torchrun on one node, or with `torchrun --rdzv-id` and a new id",
        )
    return "torchrun-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _launcher() -> str:
    """Return the number and the start time of the parent process."""
    pid = os.getppid()
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):  # no such file outside Linux
        began = ""
    return f"{pid}:{began}"


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise InvalidConfigError(name, f"{text!r} in the environment is no number") from None
