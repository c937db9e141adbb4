"""The published versions over HTTP, for generators on other machines. Read-only.

`GET /v<N>/<file>` returns a file that the list `SHA256SUMS` of the version names, or the list. No
other path has an answer, so no request leads out of the folder. The ETag of a file is its SHA-256.
Ranges (RFC 9110, section 14) let an interrupted download resume.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from turnstream.errors import (
    AccessDeniedError,
    InvalidConfigError,
    RecordError,
    UnavailableError,
    UnknownKeyError,
)
from turnstream.store.client.connection import connect_async
from turnstream.weights import CHECKSUMS, parse_checksums
from turnstream_server.http_server import HttpServer
from turnstream_server.keys.records import KeyChecks, secret_of
from turnstream_server.keys.store import is_loopback
from turnstream_server.options import split_address
from turnstream_server.tls import Tls

logger = logging.getLogger(__name__)

_OPTION: Final = "--weights-listen"
_ANY_HOST: Final = ("0.0.0.0", "[::]")  # noqa: S104 - compared, not listened on


class WeightsAccess(NamedTuple):
    """The callers that get published weights.

    Attributes:
        redis_url: store of the keys.
        run: run of the weights; a key needs the role `read` for it.
        requires_key: requests need a stored key.
        tls: certificate and key of the server; None serves without TLS.
    """

    redis_url: str
    run: str
    requires_key: bool
    tls: Tls | None = None


def weights_app(folder: Path, access: WeightsAccess | None = None) -> Starlette:
    """Return the application that serves the versions in a folder; None serves every caller."""
    checks: KeyChecks | None = None

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        nonlocal checks
        if access is None or not access.requires_key:
            yield
            return
        async with connect_async(access.redis_url, num_retries=0) as client:
            checks = KeyChecks(client, requires_key=True)
            yield

    async def serve(request: Request) -> Response:
        if access is not None and checks is not None:
            await _check_key(request, checks, run=access.run)
        return await run_in_threadpool(_respond, folder, request)

    routes = [Route("/{version}/{name:path}", serve, methods=["GET"])]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.router.redirect_slashes = False
    return app


async def _check_key(request: Request, checks: KeyChecks, *, run: str) -> None:
    """Refuse a request whose key may not read the run, as a gateway does."""
    try:
        (await checks.identify(secret_of(request.headers))).require("read", run=run)
    except UnknownKeyError as error:
        raise HTTPException(401, str(error)) from error
    except AccessDeniedError as error:
        raise HTTPException(403, str(error)) from error
    except UnavailableError as error:
        raise HTTPException(503, str(error)) from error


def _respond(folder: Path, request: Request) -> Response:
    """Return the response for a file of a version: 200, 206, 304 or 404."""
    version, name = request.path_params["version"], request.path_params["name"]
    if not re.fullmatch(r"v[0-9]+", version):
        raise HTTPException(404)
    listed = folder / version / CHECKSUMS
    if name == CHECKSUMS and listed.is_file():
        return FileResponse(listed, media_type="text/plain")
    path, digest = folder / version / name, _digests(listed).get(name)
    if digest is None or not path.is_file():
        raise HTTPException(404)
    etag = f'"{digest}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"ETag": etag})
    return FileResponse(path, media_type="application/octet-stream", headers={"ETag": etag})


def _digests(listed: Path) -> dict[str, str]:
    """Return the files of a version; none if it is unpublished, removed or damaged."""
    try:
        return parse_checksums(listed.read_text(encoding="utf-8"))
    except (OSError, RecordError):
        return {}


def serve_weights(folder: Path, *, listen: str, access: WeightsAccess | None = None) -> HttpServer:
    """Serve a weights folder from a thread until the server is closed.

    Downloads in progress are cut then; they resume at the next server.

    Args:
        folder: the versions.
        listen: "HOST:PORT"; port 0 takes a free one.
        access: the callers that get weights; None serves every caller, on the loopback alone.

    Raises:
        InvalidConfigError: `listen` is not HOST:PORT, cannot be used, or needs `access`.
    """
    host, port = split_address(listen, option=_OPTION)
    if access is None and not is_loopback(host):
        raise InvalidConfigError(
            _OPTION,
            f"other machines reach {host}: start it by `turnstream serve trainer`, "
            "which checks keys",
        )
    tls = None if access is None else access.tls
    server = HttpServer(weights_app(folder, access), host, port, option=_OPTION, tls=tls)
    logger.info("published weights are served at %s", server.url)
    return server


def advertised_url(server_url: str, given: str) -> str:
    """Return the base of announced addresses: `given`, else the address that is listened on.

    >>> advertised_url("http://127.0.0.1:7602", "")
    'http://127.0.0.1:7602'
    >>> advertised_url("http://0.0.0.0:7602", "http://trainer-0:7602/")
    'http://trainer-0:7602'

    Raises:
        InvalidConfigError: no host is known, or `given` is no HTTP address.
    """
    if given:
        if not re.match(r"https?://[^/]", given):
            raise InvalidConfigError("--weights-url", f"{given!r} is not http(s)://HOST[:PORT]")
        return given.rstrip("/")
    host = server_url.partition("://")[2].rpartition(":")[0]
    if host in _ANY_HOST:
        message = f"{host} is no address that a generator can use: name one with --weights-url"
        raise InvalidConfigError(_OPTION, message)
    return server_url
