"""Fields of a response, which is an object or its plain JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from turnstream.errors import InvalidTurnError
from turnstream.types.names import quoted

Column = tuple[str, list[Any]]
"""A field of a response, by its path, and its values."""


class Chosen(NamedTuple):
    """One output or choice, its path in errors, which ends in a dot or is "", its position."""

    source: Any
    path: str
    position: int


def chosen(source: Any, *, among: str, index: int | None) -> Chosen:
    """Return the output or choice that `index` names; the only one where it is None."""
    if source is None or isinstance(source, str | bytes | int | float | Sequence):
        raise InvalidTurnError(
            among, f"cannot be read from {quoted(source)}; give one response, or one of its {among}"
        )
    listed = field_of(source, among)
    alone = listed is None
    members = [source] if alone else list_of(listed, field=among)
    if not members:
        raise InvalidTurnError(among, "is empty")
    numbers = [field_of(member, "index") for member in members]
    if not all(isinstance(each, int) for each in numbers) or len(set(numbers)) < len(numbers):
        numbers = list(range(len(members)))
    if index is None and len(members) > 1:
        raise InvalidTurnError(
            "index", f"is None, but {among} has {len(members)}: name one of {numbers}"
        )
    if index is not None and index not in numbers:
        raise InvalidTurnError("index", f"{quoted(index)} is not in {among}, which has {numbers}")
    position = 0 if index is None else numbers.index(index)
    return Chosen(members[position], "" if alone else f"{among}[{position}].", position)


def is_unfinished(choice: Any) -> bool:
    """Whether an output or choice says that tokens are still to come."""
    if isinstance(choice, Mapping):
        return "finish_reason" in choice and choice["finish_reason"] is None
    return hasattr(choice, "finish_reason") and choice.finish_reason is None


def prompt_of(given: Iterable[int] | None, stated: Column | None, *, remedy: str) -> list[int]:
    """Return the prompt of the response, or else that of the caller."""
    own = None if given is None else list_of(given, field="prompt_ids")
    if stated is None:
        if own is None:
            raise InvalidTurnError("prompt_token_ids", f"is missing: {remedy}")
        return own
    field, prompt = stated
    if own is not None and own != prompt:
        raise InvalidTurnError(
            "prompt_ids", f"differs from {field}, the {len(prompt)} tokens that the model saw"
        )
    return prompt


def first_column(*places: tuple[str, Any, str]) -> Column | None:
    """Return the first column that has values.

    Args:
        places: the path of an object in errors, the object, and a dotted name in it.
    """
    for path, source, name in places:
        values = field_at(source, name)
        if values is not None:
            return f"{path}{name}", list_of(values, field=f"{path}{name}")
    return None


def field_at(source: Any, name: str) -> Any:
    """Return the field with a dotted name; None where there is none."""
    for part in name.split("."):
        source = field_of(source, part)
    return source


def field_of(source: Any, name: str) -> Any:
    """Return a field of an object or of a JSON mapping; None where there is none."""
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def list_of(values: Any, *, field: str) -> list[Any]:
    """Return a list, a tuple or an array of one dimension as a list."""
    listed: Any = values
    if callable(getattr(values, "tolist", None)):
        listed = values.tolist()
    elif isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        listed = list(values)
    if not isinstance(listed, list):
        raise InvalidTurnError(field, f"{quoted(values)} is not a list")
    return listed
