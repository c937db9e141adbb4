"""JSON bodies as models, with errors that name the place, the value and what was expected."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from turnstream.errors import InvalidTurnError, RecordError
from turnstream.types.names import shown
from turnstream_server.gateway.rest.ingest.turn_models import UNKNOWN

_Model = TypeVar("_Model", bound=BaseModel)


def parse_body(body: bytes, model: type[_Model]) -> _Model:
    """Return the content of a JSON body.

    Raises:
        RecordError: the body is no JSON.
        InvalidTurnError: a field is missing, unknown or of a wrong type; names its place.
    """
    try:
        return model.model_validate(from_json(body, cache_strings="keys"))
    except ValidationError as error:
        raise _named(error) from error
    except ValueError as error:
        raise RecordError(f"the body is no JSON: {error}") from error


def _named(error: ValidationError) -> InvalidTurnError:
    """Return the first error of a body, with the path of its field and the value there."""
    first = error.errors(include_url=False)[0]
    path, got = [str(part) for part in first["loc"]], first["input"]
    if first["type"] == UNKNOWN:
        name = first.get("ctx", {})["name"]
        path, got = [*path, name], got[name]
    said = "" if first["type"] == "missing" else f", got {shown(got)}"
    return InvalidTurnError(".".join(path) or "the body", f"{_in_words(first['msg'])}{said}")


def _in_words(message: str) -> str:
    """Return what pydantic expects, after the name of a field.

    >>> _in_words("Input should be a valid integer")
    'expected a valid integer'
    """
    expected = message.removeprefix("Input should be ")
    return f"expected {expected}" if expected != message else message.lower()
