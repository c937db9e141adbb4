"""Publishing a version: a folder on disk, over HTTP, and in inference servers.

Over HTTP, `GET /v<N>/<file>` returns a file that the list `SHA256SUMS` of the version names, or the
list. No other path has an answer, so no request leads out of the folder. The ETag of a file is its
SHA-256. Ranges (RFC 9110, section 14) let an interrupted download resume. A thread for each
inference server loads the newest version.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
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
    RejectedError,
    TurnstreamError,
    UnavailableError,
    UnknownKeyError,
)
from turnstream.store.client.backoff import pause_after
from turnstream.store.client.connection import connect_async
from turnstream.weights import CHECKSUMS, parse_checksums, write_checksums
from turnstream_server.failpoints import failpoint
from turnstream_server.http_server import HttpServer
from turnstream_server.keys.records import KeyChecks, secret_of
from turnstream_server.keys.store import is_loopback
from turnstream_server.models.folders import remove_unfinished
from turnstream_server.options import split_address
from turnstream_server.tls import Tls
from turnstream_server.trainer.checkpoint import publish_weights
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.engine import WriteWeights
from turnstream_server.trainer.inference_servers import InferenceServer, inference_server

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


_STOP_TIMEOUT_S: Final = 1.0


class _Version(NamedTuple):
    """A version to load."""

    number: int
    folder: Path


class Pushes:
    """Keeps inference servers at the newest version, while the trainer continues.

    A server that cannot be reached is tried again, with the pauses of `turnstream.store.client.
    backoff`, until it answers. A server that refuses a version is tried again with the next one.
    In both cases one warning is logged until the server has loaded a version again.
    """

    def __init__(self, servers: Sequence[InferenceServer]) -> None:
        self._pushers = [_Pusher(server) for server in servers]

    def push(self, version: int, folder: Path, *, timeout_s: float) -> None:
        """Push a newer version; return after the first attempt of each server.

        A server that has not loaded the version before is not waited for. So a server that is away
        delays one version at most.
        """
        waited = [pusher for pusher in self._pushers if pusher.is_current]
        for pusher in self._pushers:
            pusher.submit(_Version(version, folder))
        deadline_s = time.monotonic() + timeout_s
        for pusher in waited:
            pusher.wait_for_attempt(version, timeout_s=deadline_s - time.monotonic())

    def statistics(self) -> dict[str, int]:
        """Return the counts by the names of `turnstream_server.trainer.reporting.declarations`."""
        return {
            "num_servers_behind": sum(not pusher.is_current for pusher in self._pushers),
            "num_failed_pushes": sum(pusher.num_failures for pusher in self._pushers),
        }

    def close(self) -> None:
        """Stop. A load in progress finishes on its server."""
        for pusher in self._pushers:
            pusher.stop()


class _Pusher:
    """Loads versions into one server, in a thread of its own."""

    def __init__(self, server: InferenceServer) -> None:
        self.num_failures = 0
        self._server = server
        self._changed = threading.Condition()
        self._wanted: _Version | None = None
        self._newest = self._attempted = self._loaded = -1
        self._is_stopped = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name=f"push {server.url}", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the server has the newest version; true before the first."""
        with self._changed:
            return self._loaded == self._newest

    def submit(self, version: _Version) -> None:
        """Replace the version to load."""
        with self._changed:
            self._wanted, self._newest = version, version.number
            self._changed.notify_all()

    def wait_for_attempt(self, number: int, *, timeout_s: float) -> None:
        """Return after the first attempt at a version, whatever its outcome."""
        with self._changed:
            self._changed.wait_for(lambda: self._attempted >= number, max(0.0, timeout_s))

    def stop(self) -> None:
        """End the thread, which finishes a call in progress."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        num_in_a_row = 0
        while (version := self._next()) is not None:
            error = self._load(version)
            num_in_a_row = 0 if error is None else num_in_a_row + 1
            self._record(version, error)
            if error is not None and not isinstance(error, RejectedError):
                self._pause(version, pause_after(num_in_a_row))

    def _next(self) -> _Version | None:
        """Wait for a version to load; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._wanted is not None)
            return None if self._is_stopped else self._wanted

    def _load(self, version: _Version) -> TurnstreamError | None:
        try:
            self._server.load(version.number, version.folder)
        except TurnstreamError as error:
            return error
        return None

    def _record(self, version: _Version, error: TurnstreamError | None) -> None:
        """Record an attempt, and log it if it changes whether the server works."""
        with self._changed:
            self._attempted = version.number
            if error is None:
                self._loaded = version.number
            else:
                self.num_failures += 1
            is_over = error is None or isinstance(error, RejectedError)
            if is_over and self._wanted is version:
                self._wanted = None
            self._changed.notify_all()
        if error is not None and not self._is_failing:
            logger.warning("version %d is not in an inference server: %s", version.number, error)
        elif error is None and self._is_failing:
            logger.info("%s has version %d", self._server.url, version.number)
        self._is_failing = error is not None

    def _pause(self, version: _Version, pause_s: float) -> None:
        """Wait before the next attempt, unless there is another version or the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopped or self._wanted is not version, timeout=pause_s
            )


class WeightsPublisher:
    """Publishes the versions of one trainer, between `__enter__` and `__exit__`."""

    def __init__(self, config: TrainerConfig, access: WeightsAccess | None = None) -> None:
        """Raises InvalidConfigError for an option of `config` that is wrong.

        `access` has the callers that get the weights over HTTP: see `serve_weights`.
        """
        self._config = config
        self._access = access
        self._folder = config.folder / "weights"
        remove_unfinished(self._folder)
        self._servers = [
            inference_server(
                target,
                adapter=config.run,
                api_key=config.push_api_key,
                timeout_s=config.push_timeout_s,
            )
            for target in config.push
        ]
        self._base_url = ""
        self._pushes = Pushes([])
        self._open = ExitStack()

    def __enter__(self) -> WeightsPublisher:
        config = self._config
        self._base_url = config.weights_url and advertised_url("", config.weights_url)
        if config.weights_listen:
            listen, access = config.weights_listen, self._access
            server = serve_weights(self._folder, listen=listen, access=access)
            self._open.enter_context(server)
            self._base_url = advertised_url(server.url, config.weights_url)
        self._pushes = Pushes(self._servers)
        self._open.callback(self._pushes.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def publish(self, write: WriteWeights, *, version: int) -> str:
        """Make the weights of a version available and return the URI to announce.

        Inference servers load the version before it is announced, so that a generator finds it
        there. A server that fails delays the announcement by `push_timeout_s` at most, and never
        prevents it.
        """
        uri = publish_weights(self._folder, write, version=version)
        folder = self._folder.resolve() / f"v{version}"
        if self._base_url:
            write_checksums(folder)
            uri = f"{self._base_url}/v{version}"
        failpoint("publish.before_push")
        self._pushes.push(version, folder, timeout_s=self._config.push_timeout_s)
        return uri

    def statistics(self) -> dict[str, int]:
        """Return the metrics of the pushes."""
        return self._pushes.statistics()
