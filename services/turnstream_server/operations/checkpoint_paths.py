"""Paths of checkpoints: `tinker://<model id>/<kind>/<name>`."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, cast, get_args
from urllib.parse import quote

from turnstream.errors import BatchingError

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]

_SCHEME: Final = "tinker://"
_MAX_LENGTH: Final = 200
"""Longest encoded name: it is the name of a folder, which has at most 255 bytes."""

_FORM: Final = f"{_SCHEME}<model id>/<{' | '.join(get_args(CheckpointKind))}>/<name>"


class CheckpointPath(NamedTuple):
    """Where a checkpoint is; its text is the path.

    >>> str(CheckpointPath.parse("tinker://S:train:0/weights/s1"))
    'tinker://S:train:0/weights/s1'
    """

    model_id: str
    kind: CheckpointKind
    name: str

    @classmethod
    def parse(cls, text: str) -> CheckpointPath:
        """Return the path in a text; BatchingError for another text."""
        parts = text.removeprefix(_SCHEME).split("/")
        is_path = text.startswith(_SCHEME) and len(parts) == 3
        if not is_path or not parts[0].strip(".") or parts[1] not in get_args(CheckpointKind):
            raise BatchingError(f"path is {text!r}, expected {_FORM}")
        model_id, kind, name = parts
        return cls(model_id, cast(CheckpointKind, kind), checkpoint_name(name))

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model_id}/{self.kind}/{self.name}"


def checkpoint_name(name: str) -> str:
    """Return the name; BatchingError if it cannot be the last part of a path."""
    if name in ("", ".", ".."):
        raise BatchingError(f"name of a checkpoint is {name!r}, expected a word")
    for character in name:
        if character in "/\\" or not character.isprintable():
            raise BatchingError(f"name of a checkpoint is {name!r}: {character!r} is not allowed")
    if (length := len(quote(name, safe=""))) > _MAX_LENGTH:
        limit = f"expected {_MAX_LENGTH} characters at most, encoded as in a URL"
        raise BatchingError(f"name of a checkpoint is {name[:32]!r}.. of {length}, {limit}")
    return name
