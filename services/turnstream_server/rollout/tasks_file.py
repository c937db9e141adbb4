"""The file of `--tasks`: one JSON object a line, read in portions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from turnstream.errors import InvalidConfigError, InvalidTurnError
from turnstream.store.run.tasks import MAX_PAYLOAD_BYTES, Prompt
from turnstream.types.names import quoted

_PORTION: Final = 1_024
"""Prompts of one portion, at most."""

_PORTION_BYTES: Final = 1_000_000
"""Bytes of their payloads, above which the portion ends."""


def parse_task(line: bytes, *, number: int, num_samples: int) -> Prompt:
    """Return the prompt of a line; InvalidTurnError for a line that is none.

    >>> parse_task(b'{"id": 7, "question": "6 * 7"}', number=1, num_samples=2).prompt_uid
    '7'
    >>> parse_task(b'{"question": "6 * 7"}', number=3, num_samples=2).prompt_uid
    '3'
    """
    if len(line) > MAX_PAYLOAD_BYTES:
        raise InvalidTurnError("task", f"it has more than {MAX_PAYLOAD_BYTES} bytes, the limit")
    try:
        task = json.loads(line)
    except ValueError as error:
        raise InvalidTurnError("task", f"it is no JSON: {error}") from error
    if not isinstance(task, dict):
        raise InvalidTurnError("task", f"it is {quoted(task)}, expected a JSON object")
    name = cast("dict[str, Any]", task).get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise InvalidTurnError("id", f"{quoted(name)} is neither a text nor a whole number")
    return Prompt(prompt_uid=str(name), payload=line, num_samples=num_samples)


def read_tasks(path: Path, *, num_samples: int) -> Iterator[Prompt]:
    """Yield the prompts of a file. Empty lines are skipped, and counted as lines.

    Raises:
        InvalidConfigError: the file cannot be read; or a line is wrong, with its number.
    """
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_PAYLOAD_BYTES + 2):
                number += 1
                if line := line.strip():
                    yield parse_task(line, number=number, num_samples=num_samples)
    except InvalidTurnError as error:
        raise InvalidConfigError("--tasks", f"line {number} of {path}: {error}") from error
    except OSError as error:
        raise InvalidConfigError("--tasks", f"{path} cannot be read: {error.strerror}") from error


def checked_tasks(path: Path, *, num_samples: int) -> int:
    """Return the number of prompts of a file, all of which are right; errors as of `read_tasks`."""
    num_tasks = sum(1 for _ in read_tasks(path, num_samples=num_samples))
    if not num_tasks:
        raise InvalidConfigError("--tasks", f"{path} has no task")
    return num_tasks


def portions(path: Path, *, num_samples: int) -> Iterator[tuple[int, list[Prompt]]]:
    """Yield the prompts of a file in portions, each with the number of its first prompt, from 1."""
    first, portion, num_bytes = 1, list[Prompt](), 0
    for prompt in read_tasks(path, num_samples=num_samples):
        portion.append(prompt)
        num_bytes += len(prompt.payload)
        if len(portion) == _PORTION or num_bytes > _PORTION_BYTES:
            yield first, portion
            first, portion, num_bytes = first + len(portion), [], 0
    if portion:
        yield first, portion
