"""Content of request bodies: plain, gzip or zstd, bounded before and after decompression."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Final

import zstandard
from fastapi import HTTPException, Request
from pydantic import BaseModel, ConfigDict

from turnstream.errors import RecordError
from turnstream_server.gateway.bodies import off_loop, read_body

JSON: Final = "application/json"
ARROW: Final = "application/vnd.apache.arrow.stream"
ARROW_BODY: Final = {
    "schema": {
        "type": "string",
        "format": "binary",
        "description": "An Arrow IPC stream; docs/http.md lists the columns.",
    }
}
"""The OpenAPI description of a request with an Arrow body."""

MAX_JSON_BYTES: Final = 16 << 20
"""Largest body of JSON. The parser holds the interpreter lock, also in a thread, for about 10 ms
per MB, and no other request is answered then. Parsed, it takes ten times its size in memory."""

MAX_ITEMS: Final = 8192
"""Items of one request: each has a result, and the largest ones are the groups of a whole step."""

_ENCODINGS: Final = ("gzip", "zstd")
_GZIP: Final = 31  # wbits of zlib for a gzip header and trailer
_PIECE_BYTES: Final = 1 << 20
_WINDOW_BYTES: Final = 8 << 20
"""Memory of a zstd decoder: RFC 8878 asks for 8 MB, and a frame may ask for gigabytes."""


class Body(BaseModel):
    """A body whose unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


async def read_content(request: Request, *, media_type: str = JSON) -> bytes:
    """Return the decompressed body of a request.

    Raises:
        HTTPException: 413 for a body above `max_body_bytes`, compressed or not, or for JSON above
            MAX_JSON_BYTES; 415 for a Content-Encoding other than gzip and zstd.
        RecordError: the body cannot be decompressed.
    """
    limit: int = request.app.state.gateway.options.max_body_bytes
    if media_type == JSON:
        limit = min(limit, MAX_JSON_BYTES)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in (*_ENCODINGS, "identity"):
        accepted = ", ".join(_ENCODINGS)
        raise HTTPException(415, f"Content-Encoding is {encoding!r}, expected one of {accepted}")
    body = await read_body(request)
    if encoding == "identity":
        if len(body) > limit:
            raise _too_large(limit)
        return body
    return await off_loop(
        lambda: decompress(body, encoding=encoding, limit=limit), num_bytes=len(body)
    )


def media_type_of(request: Request, *, accepted: tuple[str, ...]) -> str:
    """Return the media type of a body without its parameters; 415 for one that is not accepted."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in accepted:
        expected = " or ".join(accepted)
        raise HTTPException(415, f"Content-Type is {media_type!r}, expected {expected}")
    return media_type


def decompress(body: bytes, *, encoding: str, limit: int) -> bytes:
    """Return the content of a compressed body; never more than `limit` bytes are made.

    Raises:
        HTTPException: 413 for more than `limit` bytes.
        RecordError: the body is damaged, or is cut off.
    """
    pieces = _gzip_pieces(body, limit) if encoding == "gzip" else _zstd_pieces(body)
    content: list[bytes] = []
    num_bytes = 0
    try:
        for piece in pieces:
            num_bytes += len(piece)
            if num_bytes > limit:
                raise _too_large(limit)
            content.append(piece)
    except (zlib.error, zstandard.ZstdError) as error:
        raise RecordError(f"the body is no {encoding}: {error}") from error
    return b"".join(content)


def _too_large(limit: int) -> HTTPException:
    message = f"the body has more than {limit} bytes: send fewer items in one request"
    return HTTPException(413, message)


def _gzip_pieces(body: bytes, limit: int) -> Iterator[bytes]:
    """Yield the members of a gzip file, each of at most one byte more than `limit`."""
    while body:
        member = zlib.decompressobj(wbits=_GZIP)
        yield member.decompress(body, limit + 1)
        if not member.eof and not member.unconsumed_tail:
            raise RecordError("the body is cut off: its gzip member has no end")
        body = member.unused_data


def _zstd_pieces(body: bytes) -> Iterator[bytes]:
    decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    with decoder.stream_reader(body, read_across_frames=True) as reader:
        while piece := reader.read(_PIECE_BYTES):
            yield piece


def json_body(model: type[BaseModel], *, example: Any) -> dict[str, Any]:
    """Return the OpenAPI description of a request with this model as a JSON body."""
    return {"schema": inlined_schema(model), "example": example}


def inlined_schema(model: type[BaseModel]) -> dict[str, Any]:
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
