"""Content of request bodies: plain, gzip or zstd, bounded before and after decompression.

FastAPI parses some bodies itself, in the event loop and before any key: `SmallBodyRoute` has a
smaller limit for them.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, TypeVar

import zstandard
from fastapi import HTTPException, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from turnstream.errors import InvalidTurnError, RecordError
from turnstream.types.names import quoted
from turnstream_server.gateway.bodies import (
    MAX_JSON_BYTES,
    Parsers,
    body_of,
    read_large_body,
    too_large_text,
)

JSON: Final = "application/json"
ARROW: Final = "application/vnd.apache.arrow.stream"
_ARROW_BODY: Final = {
    "schema": {
        "type": "string",
        "format": "binary",
        "description": "An Arrow IPC stream; docs/http.md lists the columns.",
    }
}
"""The OpenAPI description of a request with an Arrow body."""

MAX_ITEMS: Final = 8192
"""Rewards, prompts, or members of a task of one request: each has a result."""

MAX_WRITES: Final = 2048
"""Groups, turns or trajectories of one request: each costs about 0.4 ms of CPU time."""

MAX_TURNS: Final = 4096
"""Turns of all trajectories of one request, each about 0.15 ms."""

MAX_SMALL_BYTES: Final = 256 << 10
"""Largest body that FastAPI parses, in about 3 ms. The event loop does nothing else."""

MAX_MEMBERS: Final = 1024
"""Members of a gzip body: each costs a decoder, and may be empty."""

MAX_MEMBERS_OF_GROUPS: Final = 16_384
"""Trajectories that one request opens: as many as a key may have open."""

_ENCODINGS: Final = ("gzip", "zstd")
_GZIP: Final = 31  # wbits of zlib for a gzip header and trailer
_PIECE_BYTES: Final = 64 << 10
_WINDOW_BYTES: Final = 8 << 20
"""Memory of a zstd decoder: RFC 8878 asks for 8 MB, and a frame may ask for gigabytes."""


_UNKNOWN: Final = "unknown_field"
"""Type of the error of an unknown field."""

_Model = TypeVar("_Model", bound=BaseModel)
_Parsed = TypeVar("_Parsed")


class Body(BaseModel):
    """A body whose unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class Part(BaseModel):
    """An object of a body. It reports one error: a body may have millions of wrong fields."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict) and not given.keys() <= cls.model_fields.keys():
            name = next(each for each in given if each not in cls.model_fields)
            raise PydanticCustomError(_UNKNOWN, "unknown field", {"name": name})
        return given


async def read_content(request: Request, *, media_type: str = JSON) -> bytes:
    """Return the decompressed body of a request.

    HTTPException 413 for a body above the limit of its key or MAX_JSON_BYTES, 415 for an unknown
    Content-Encoding, 429 as of `RequestBody`. RecordError if it cannot be decompressed.
    """
    sent = body_of(request)
    limit = min(sent.limit, MAX_JSON_BYTES) if media_type == JSON else sent.limit
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in (*_ENCODINGS, "identity"):
        accepted = ", ".join(_ENCODINGS)
        raise HTTPException(415, f"Content-Encoding is {encoding!r}, expected one of {accepted}")
    body = await read_large_body(request)
    if encoding == "identity":
        if len(body) > limit:
            raise _too_large(limit)
        return body
    unpack = functools.partial(
        decompress, body, encoding=encoding, limit=limit, count=sent.count_unpacked
    )
    # In a thread for every size: few bytes may become many.
    parsers: Parsers = request.app.state.gateway.parsers
    return await parsers.in_thread(unpack, owner=sent.owner)


class SmallBodyRoute(APIRoute):
    """A route whose parsed body has at most `MAX_SMALL_BYTES`; 413 for a larger one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        handle = super().get_route_handler()

        async def handle_small(request: Request) -> Response:
            return await handle(_SmallRequest(request.scope, request.receive))

        return handle_small


class _SmallRequest(Request):
    async def body(self) -> bytes:
        """Return the body; 413 for one that is too large."""
        body = await super().body()
        if len(body) > MAX_SMALL_BYTES:
            raise HTTPException(413, too_large_text(MAX_SMALL_BYTES))
        return body


def media_type_of(request: Request, *, accepted: tuple[str, ...]) -> str:
    """Return the media type of a body without its parameters; 415 for one that is not accepted."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in accepted:
        expected = " or ".join(accepted)
        raise HTTPException(415, f"Content-Type is {media_type!r}, expected {expected}")
    return media_type


async def parsed_json(
    request: Request, parse: Callable[[bytes], _Parsed], *, owner: str
) -> _Parsed:
    """Return a JSON body as its parser, a function of a module, returns it; see `Parsers.run`."""
    content = await read_content(request, media_type=media_type_of(request, accepted=(JSON,)))
    parsers: Parsers = request.app.state.gateway.parsers
    return await parsers.run(parse, content, owner=owner, is_json=True)


def decompress(
    body: bytes, *, encoding: str, limit: int, count: Callable[[int], None] = lambda _: None
) -> bytes:
    """Return the content of a gzip or zstd body; never more than `limit` bytes are made.

    `count` is called with the number of new bytes, and may raise an error. HTTPException 413 above
    `limit`; RecordError for a body that is damaged, cut off, or has more than MAX_MEMBERS parts.
    """
    pieces = _gzip_pieces(body) if encoding == "gzip" else _zstd_pieces(body)
    content = bytearray()
    try:
        for piece in pieces:
            if len(content) + len(piece) > limit:
                raise _too_large(limit)
            count(len(piece))
            content += piece
    except (zlib.error, zstandard.ZstdError) as error:
        raise RecordError(f"the body is no {encoding}: {error}") from error
    return bytes(content)


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"{too_large_text(limit)}: send fewer items in one request")


def _gzip_pieces(body: bytes) -> Iterator[bytes]:
    """Yield the content of all members of a gzip file, in small pieces.

    The decoder copies the rest of its input at the end of a member, so it gets little at once.
    """
    position = num_members = 0
    while position < len(body):
        num_members += 1
        if num_members > MAX_MEMBERS:
            raise RecordError(f"the body has more than {MAX_MEMBERS} gzip members")
        member = zlib.decompressobj(wbits=_GZIP)
        while not member.eof:
            piece = body[position : position + _PIECE_BYTES]
            if not piece:
                raise RecordError("the body is cut off: its gzip member has no end")
            position += len(piece)
            yield member.decompress(piece, _PIECE_BYTES)
            while member.unconsumed_tail and not member.eof:
                yield member.decompress(member.unconsumed_tail, _PIECE_BYTES)
        position -= len(member.unused_data)


def _zstd_pieces(body: bytes) -> Iterator[bytes]:
    decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    with decoder.stream_reader(body, read_across_frames=True) as reader:
        while piece := reader.read(_PIECE_BYTES):
            yield piece


def parse_body(body: bytes, model: type[_Model]) -> _Model:
    """Return the content of a JSON body; RecordError, or InvalidTurnError with the wrong field."""
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
    if first["type"] == _UNKNOWN:
        name = first.get("ctx", {})["name"]
        path, got = [*path, name], got[name]
    said = "" if first["type"] == "missing" else f", got {quoted(got)}"
    return InvalidTurnError(".".join(path) or "the body", f"{_in_words(first['msg'])}{said}")


def _in_words(message: str) -> str:
    """Return what pydantic expects, after the name of a field.

    >>> _in_words("Input should be a valid integer")
    'expected a valid integer'
    """
    expected = message.removeprefix("Input should be ")
    return f"expected {expected}" if expected != message else message.lower()


def described_body(
    model: type[BaseModel], *, example: Any, has_arrow: bool = False
) -> dict[str, Any]:
    """Return the OpenAPI description of a request with this model as JSON, or an Arrow stream."""
    content = {JSON: {"schema": _inlined_schema(model), "example": example}}
    if has_arrow:
        content[ARROW] = _ARROW_BODY
    return {"requestBody": {"required": True, "content": content}}


def _inlined_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a model, with the schemas of its parts in their places.

    FastAPI collects the parts of declared parameters only, and a body that may be compressed is
    read by hand.
    """
    schema = model.model_json_schema()
    parts = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, list):
            return [inline(each) for each in node]
        if not isinstance(node, dict):
            return node
        if (reference := node.get("$ref")) is not None:
            rest = {name: value for name, value in node.items() if name != "$ref"}
            return inline({**parts[reference.rpartition("/")[2]], **rest})
        return {name: inline(value) for name, value in node.items()}

    return inline(schema)
