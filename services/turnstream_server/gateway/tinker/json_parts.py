"""Parts of JSON bodies that several calls have, and errors that name field and value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from turnstream.errors import BatchingError, RecordError
from turnstream_server.gateway.tinker.loss_inputs import require_tokens

Int32 = Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]

_UNKNOWN: Final = "unknown_setting"
"""The type of the error of `Settings`."""

_LONGEST_VALUE: Final = 80
"""Characters of a value that an error quotes."""

_Model = TypeVar("_Model", bound=BaseModel)


class Part(BaseModel):
    """An object of a body. Fields that a newer SDK adds are ignored."""

    model_config = ConfigDict(extra="ignore")


class Settings(Part):
    """An object of settings. A field that is not known is refused, unless it is null."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: object) -> object:
        if isinstance(values, dict):
            given = cast("dict[str, object]", values)
            unknown = [name for name in given if name not in cls.model_fields]
            if named := ", ".join(repr(each) for each in unknown if given[each] is not None):
                context = {"named": _short(named), "known": ", ".join(cls.model_fields)}
                raise PydanticCustomError(_UNKNOWN, "{named} is unknown; known: {known}", context)
        return values


class Chunk(Part):
    """A chunk of a prompt; old releases send no type."""

    type: str | None = None
    tokens: list[Int32] | None = None


class ModelInput(Part):
    """The chunks of a prompt, one after another."""

    chunks: list[Chunk]

    def arrays(self, name: str) -> list[NDArray[np.int32]]:
        """Return the tokens of each chunk; BatchingError names `name` if one has no tokens."""
        for chunk in self.chunks:
            require_tokens(chunk.type or "encoded_text", name=name)
        return [np.array(chunk.tokens or [], np.int32) for chunk in self.chunks]


def read_header(body: bytes, model: type[_Model]) -> tuple[dict[str, Any], _Model]:
    """Return a JSON object, and the fields of it that `model` has; RecordError for others."""
    try:
        content = json.loads(body)
        return content, model.model_validate(content)
    except ValidationError as error:
        raise RecordError(_problem(error, path=["the body"])) from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"the body is no JSON: {error}") from error


def read_fields(body: bytes, model: type[_Model]) -> _Model:
    """Return the fields of a JSON body; RecordError names a wrong field and its value."""
    return read_header(body, model)[1]


def read_part(content: object, model: type[_Model], *, path: Sequence[str]) -> _Model:
    """Return the content at a path of a body; BatchingError names a wrong field and its value."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise BatchingError(_problem(error, path=path)) from error


def _problem(error: ValidationError, *, path: Sequence[str]) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    inner = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"])
    named = ", ".join([*path, *([inner.removeprefix(".")] if inner else [])])
    if first["type"] == _UNKNOWN:
        return f"{named}: {first['msg']}"
    got = "" if first["type"] == "missing" else f", got {_short(repr(first['input']))}"
    return f"{named}: {first['msg'].lower()}{got}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
