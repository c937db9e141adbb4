"""One gateway process: the HTTP server of the Tinker API, until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Final

import redis.asyncio
import uvicorn

from turnstream.errors import InvalidConfigError, TurnstreamError
from turnstream.store.client.connection import connect, connect_async
from turnstream_server.gateway.admission import LimitedApp
from turnstream_server.gateway.app import make_app
from turnstream_server.gateway.config import GatewayOptions
from turnstream_server.gateway.observing import ObservedApp
from turnstream_server.gateway.polls import Polls
from turnstream_server.gateway.proxy.hosted import engines_of
from turnstream_server.gateway.state import Gateway, bounded_client
from turnstream_server.http_server import BACKLOG, listening_socket
from turnstream_server.interpreter import return_free_memory, tune_process
from turnstream_server.loops import background
from turnstream_server.operations.models import read_bases
from turnstream_server.operations.results import drop_due
from turnstream_server.operations.sessions import close_silent
from turnstream_server.options import split_address, write_address
from turnstream_server.telemetry.readiness import folder_check, store_check

logger = logging.getLogger(__name__)

_CLOSE_EVERY_S: Final = 10.0
_RETURN_EVERY_S: Final = 10.0
_GRACE_S: Final = 60.0
"""Time for heartbeats after a start or an outage, before silent sessions are closed."""

_ANSWER_S: Final = 2.0
_IDLE_S: Final = 75
"""Time after which an idle connection is closed; clients send a heartbeat every 10 s."""


class _Server(uvicorn.Server):
    """A server that leaves signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def run_gateway(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT, then stop cleanly; errors as of `serving`."""
    _allow_connections()
    asyncio.run(_serve_until_signal(options))


async def _serve_until_signal(options: GatewayOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(options) as address:
        tune_process()
        if options.address_file is not None:
            await asyncio.to_thread(write_address, options.address_file, address)
        await stop.wait()
        logger.info("gateway at %s stops", address)


@contextlib.asynccontextmanager
async def serving(options: GatewayOptions) -> AsyncIterator[str]:
    """Serve until the end of the block; yield the bound "host:port", or "https://host:port".

    The store may be away, also at the start: requests are answered with 503, and polls are held.
    """
    async with contextlib.AsyncExitStack() as stack:
        listener, address = _listening(options.listen)
        address = f"https://{address}" if options.tls else address
        stack.callback(listener.close)
        client = await stack.enter_async_context(
            bounded_client(options.redis_url, max_connections=options.max_store_connections)
        )
        waiting = await stack.enter_async_context(connect_async(options.redis_url, num_retries=0))
        polls = Polls(client, waiting)
        await stack.enter_async_context(polls.listening())
        deleting = _delete_without_end(client, silence_s=options.session_silence_s)
        await stack.enter_async_context(background(deleting, name="deletion"))
        await stack.enter_async_context(background(_return_memory_without_end(), name="memory"))
        gateway = Gateway(options, client, polls)
        await stack.enter_async_context(gateway.resources)
        engines = await gateway.resources.enter_async_context(engines_of(gateway))
        app = ObservedApp(LimitedApp(make_app(gateway, engines), gateway))
        _add_checks(options)
        await stack.enter_async_context(_served(app, listener, polls, options))
        stack.push_async_callback(gateway.closing.aclose)
        logger.info("gateway listens at %s", address)
        yield address


@contextlib.asynccontextmanager
async def _served(
    app: ObservedApp, listener: socket.socket, polls: Polls, options: GatewayOptions
) -> AsyncIterator[None]:
    """Answer requests in the block; then end held polls, and finish the other requests."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        access_log=False,
        log_config=None,
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=max(1, round(options.shutdown_grace_s)),
        ssl_certfile=None if options.tls is None else str(options.tls.cert),
        ssl_keyfile=None if options.tls is None else str(options.tls.key),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="gateway")
    try:
        yield
    finally:
        server.should_exit = True
        polls.close()
        await task


def _add_checks(options: GatewayOptions) -> None:
    """Check store and folder; the base models are shown, because not every gateway needs one."""

    def base_models() -> str:
        with connect(options.redis_url, num_retries=0, silent_s=_ANSWER_S) as client:
            return "" if read_bases(client) else "no worker serves a base model"

    readiness = options.readiness
    readiness.add("store", store_check(options.redis_url, durability=options.durability))
    readiness.add("base_models", base_models, is_needed=False)
    if options.folder is not None:
        readiness.add("folder", folder_check(options.folder, is_written=False))


async def _delete_without_end(client: redis.asyncio.Redis, *, silence_s: float) -> None:
    """Close silent sessions, and drop expired results, without end.

    After a start or an outage no session had a chance to send a heartbeat, or to fetch a result.
    """
    pause_s, grace_s = min(_CLOSE_EVERY_S, silence_s / 2), min(_GRACE_S, silence_s)
    await asyncio.sleep(grace_s)
    while True:
        try:
            for session_id in await close_silent(client, silence_s=silence_s):
                logger.info("session closed: no heartbeat", extra={"session": session_id})
            await drop_due(client)
            await asyncio.sleep(pause_s)
        except Exception as error:
            is_known = isinstance(error, TurnstreamError)
            message = "silent sessions and results are not deleted: %s"
            logger.warning(message, error, exc_info=None if is_known else error)
            await asyncio.sleep(grace_s)


async def _return_memory_without_end() -> None:
    while True:
        await asyncio.sleep(_RETURN_EVERY_S)
        return_free_memory()


def _listening(listen: str) -> tuple[socket.socket, str]:
    host, port = split_address(listen, option="--listen")
    try:
        listener = listening_socket(host, port)
    except OSError as error:
        raise InvalidConfigError(
            "--listen",
            f"{listen!r} cannot be used ({error}): choose another port with --listen or "
            "TURNSTREAM_HTTP_PORT; 0 takes a free one",
        ) from error
    return listener, f"{host}:{listener.getsockname()[1]}"


def _allow_connections() -> None:
    """Raise the limit of open files: each poll is a connection, and 1,024 is a usual limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
