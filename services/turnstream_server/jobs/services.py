"""The services of Turnstream as processes of a stack: command lines, and waiting until ready.

The address of the store travels in the environment, where it may carry a password.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from turnstream_server.jobs.stack import Service, Stack
from turnstream_server.models.spec import SmallModelSpec

_READY_S = 60.0


class StartedBatcher(NamedTuple):
    """A batcher that answers at `address`, "host:port"."""

    service: Service
    address: str


def store_environment(url: str) -> dict[str, str]:
    """Return the environment variable that names the store to a service."""
    return {"TURNSTREAM_REDIS_URL": url}


def start_batcher(stack: Stack, *, name: str, listen: str = "127.0.0.1:0") -> StartedBatcher:
    """Start a batcher and wait until it answers."""
    address_file = stack.folder / f"{name}.address"
    address_file.unlink(missing_ok=True)
    service = start_service(stack, "batcher", name, listen=listen, address_file=address_file)
    address = stack.wait_for_file(address_file, of=service, timeout_s=_READY_S)
    return StartedBatcher(service, address)


def start_service(
    stack: Stack, kind: str, name: str, arguments: Sequence[str] = (), **options: object
) -> Service:
    """Start `turnstream serve <kind>`.

    Args:
        stack: receives the process.
        kind: the command: "batcher", "trainer", "generator" or "replayer".
        name: name of the process and of its log.
        arguments: arguments of the command without an option.
        options: `dump=path` is `--dump path`; an option that is None is left out.
    """
    words = [*arguments]
    for option, value in options.items():
        if value is not None:
            words += [f"--{option.replace('_', '-')}", str(value)]
    return stack.start(name, ["serve", kind, *words])


def write_policy(folder: Path, policy: SmallModelSpec) -> Path:
    """Write a policy to a file that a command line can name; return its path."""
    path = folder / "policy.json"
    path.write_text(json.dumps(asdict(policy), indent=2) + "\n", encoding="utf-8")
    return path
