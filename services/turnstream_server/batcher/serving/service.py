"""One batcher process: the gRPC server and a planner per run, until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import grpc
import grpc.aio
import redis.asyncio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from turnstream.errors import InvalidConfigError, TurnstreamError
from turnstream.store.client.connection import connect_async
from turnstream.store.client.scripts import run_command_async
from turnstream.store.run.batchers import LEASE_S, SECURE, register_command
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.planner.listener import PARK_AFTER_S, ParkedRuns
from turnstream_server.batcher.planner.planner import RunPlanner
from turnstream_server.batcher.planner.renewal import LeadershipKeeper
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.planner.snapshotting import DEFAULT_UPKEEP, Upkeep
from turnstream_server.batcher.serving.get import BatchSender
from turnstream_server.batcher.serving.health import StoreHealth
from turnstream_server.batcher.serving.operations import OperationSender
from turnstream_server.batcher.serving.registry import RunDiscovery, RunRegistry
from turnstream_server.batcher.serving.requests import Access
from turnstream_server.batcher.serving.run_metrics import observed_replica
from turnstream_server.batcher.serving.running_calls import ReasonCache, RunningCalls
from turnstream_server.batcher.serving.servicer import SERVICE, BatchesServicer, handlers
from turnstream_server.interpreter import tune_process
from turnstream_server.keys.records import KeyChecks
from turnstream_server.ledger.core.frontier import Frontier
from turnstream_server.loops import background, first_result
from turnstream_server.options import split_address, write_address
from turnstream_server.telemetry.readiness import Readiness
from turnstream_server.tls import Tls

logger = logging.getLogger(__name__)

_SERVER_OPTIONS: Final = (
    # Two batchers on one port would each answer half of the calls, unnoticed.
    ("grpc.so_reuseport", 0),
    # Requests are small, our own messages bounded: the limit only stops what is not ours.
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", -1),
    # A client that waits minutes for a batch gets no data in that time: pings keep its path through
    # load balancers open, and a peer that is gone is noticed.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # On a slow link, the answer to a ping waits until the bytes that are on their way have arrived.
    ("grpc.http2.ping_timeout_ms", 300_000),
    # Clients ping every 2 s while a call is open, to notice a frozen replica.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)

_REGISTER_EVERY_S: Final = LEASE_S / 3
_DEREGISTER_S: Final = 1.0
"""Longest wait for the store when this replica stops."""

_ANY_HOST: Final = ("", "0.0.0.0", "[::]", "::")  # noqa: S104 - compared, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherOptions:
    """Settings of one batcher replica; `Settings` explains those of the environment.

    Attributes:
        address_file: receives the bound address once the server answers; None for none.
        requires_key: calls need a stored key; see `KeyChecks`.
        tls: certificate and key of the server; None serves without TLS.
        park_after_s: seconds without news after which a run is parked, if nothing in it can expire.
            A parked run costs nothing until something is written to it.
        cache_bytes: limit of payload, rows and encoded mini-batches in memory, least recently used
            dropped first. One mini-batch that is larger is still served. The rows of training calls
            of hosted models have a limit of their own, at most 256 MiB.
        shutdown_grace_s: time for calls in progress after a request to stop.
        readiness: receives the checks of the dependencies.
    """

    redis_url: str
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    address_file: Path | None = None
    requires_key: bool = False
    tls: Tls | None = None
    get_wait_max_s: float = 60.0
    leader_lease_s: float = 5.0
    park_after_s: float = PARK_AFTER_S
    cache_bytes: int = 1 << 30
    upkeep: Upkeep = DEFAULT_UPKEEP
    shutdown_grace_s: float = 2.0
    readiness: Readiness = field(default_factory=lambda: Readiness("batcher"))


def run_batcher(options: BatcherOptions) -> None:
    """Serve until SIGTERM or SIGINT, then stop cleanly; errors as of `serving`."""
    asyncio.run(_serve_until_signal(options))


async def _serve_until_signal(options: BatcherOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(options) as address:
        tune_process()
        if options.address_file is not None:
            write_address(options.address_file, address)
        await stop.wait()
        logger.info("batcher at %s stops", address)


@contextlib.asynccontextmanager
async def serving(options: BatcherOptions) -> AsyncIterator[str]:
    """Serve until the end of the block; yield the bound "host:port", or "grpcs://host:port".

    Raises:
        InvalidConfigError: the address to listen on is taken, or none.
        StoreUnavailableError: the store cannot be reached at the start.
    """
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect_async(options.redis_url))
        waiting = connect_async(options.redis_url, num_retries=0)
        await stack.enter_async_context(waiting)
        planning = await _start_planning(stack, options, client=client, waiting=waiting)
        health = StoreHealth(waiting, SERVICE)
        await health.update()
        await stack.enter_async_context(
            background(health.keep_updating(), name="health of the store")
        )
        stack.enter_context(
            observed_replica(
                options.redis_url,
                options.readiness,
                runs=planning.runs,
                keeper=planning.keeper,
                assembler=planning.assembler,
                health=health,
            )
        )
        running = RunningCalls()
        server = _make_server(stack, options, client=client, planning=planning, running=running)
        add_HealthServicer_to_server(health, server)
        address = _bind(server, options.listen, tls=options.tls)
        await server.start()
        grace_s = options.shutdown_grace_s
        stack.push_async_callback(_stop, server, running, planning.runs, health, grace_s)
        await stack.enter_async_context(
            registered(waiting, advertised(address, options.advertise), options.readiness)
        )
        logger.info("batcher listens at %s", address)
        yield address


class _Planning(NamedTuple):
    """The parts of a replica that plan and assemble."""

    runs: RunRegistry
    keeper: LeadershipKeeper
    assembler: Assembler


async def _start_planning(
    stack: contextlib.AsyncExitStack,
    options: BatcherOptions,
    *,
    client: redis.asyncio.Redis,
    waiting: redis.asyncio.Redis,
) -> _Planning:
    """Return the parts that plan every run, until `stack` is closed; `waiting` has no retries."""
    assembler = Assembler(options.redis_url, max_cache_bytes=options.cache_bytes)
    stack.push_async_callback(assembler.close)
    keeper = LeadershipKeeper(options.redis_url, owner=_owner(), lease_s=options.leader_lease_s)
    stack.push_async_callback(keeper.close)
    reason_cache = ReasonCache(options.redis_url)
    stack.callback(reason_cache.close)
    parked = ParkedRuns(waiting, after_s=options.park_after_s)

    def new_planner(run: str, frontier: Frontier) -> RunPlanner:
        view = RunView(
            client,
            run,
            frontier=frontier,
            on_stepped=lambda step: assembler.release(run, through_step=step),
            read_reasons=reason_cache.reasons,
        )
        return RunPlanner(view, assembler, keeper=keeper, upkeep=options.upkeep, parked=parked)

    runs = RunRegistry(client, new_planner, parked)
    await stack.enter_async_context(background(parked.watch(), name="watch of parked runs"))
    stack.push_async_callback(runs.close)
    discovery = RunDiscovery(waiting, runs.take_part)
    await discovery.read_all()
    await stack.enter_async_context(background(discovery.follow(), name="discovery of runs"))
    return _Planning(runs, keeper, assembler)


def _make_server(
    stack: contextlib.AsyncExitStack,
    options: BatcherOptions,
    *,
    client: redis.asyncio.Redis,
    planning: _Planning,
    running: RunningCalls,
) -> grpc.aio.Server:
    """Return the server of all calls, which is not started; `stack` closes its senders."""
    find_run, wait_max_s = planning.runs.find, options.get_wait_max_s
    operations = OperationSender(client, max_cache_bytes=options.cache_bytes)
    stack.push_async_callback(operations.close)
    servicer = BatchesServicer(client, find_run)
    sender = BatchSender(client, find_run, planning.assembler, wait_max_s=wait_max_s)
    access = Access(client, KeyChecks(client, requires_key=options.requires_key))
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    server.add_generic_rpc_handlers(handlers(servicer, sender, operations, running, access))
    return server


async def _stop(
    server: grpc.aio.Server,
    running: RunningCalls,
    runs: RunRegistry,
    health: StoreHealth,
    grace_s: float,
) -> None:
    """Finish transfers in progress; refuse calls that wait for a batch."""
    await health.enter_graceful_shutdown()
    runs.dismiss()
    await server.stop(grace_s)
    await running.close()


@contextlib.asynccontextmanager
async def registered(
    client: redis.asyncio.Redis, address: str, readiness: Readiness
) -> AsyncIterator[None]:
    """Keep an address registered inside the block, also after an outage of the store."""
    ends_s = time.monotonic()

    async def register(lease_s: float) -> None:
        nonlocal ends_s
        began_s = time.monotonic()
        try:
            await run_command_async(client, register_command(address, lease_s=lease_s))
            ends_s = began_s + lease_s
        except TurnstreamError as error:
            logger.debug("the address %s is not registered: %s", address, error)

    def trouble() -> str:
        return "" if time.monotonic() < ends_s else f"{address} is not registered in the store"

    readiness.add("registration", trouble)

    async def renew() -> None:
        while True:
            await asyncio.sleep(_REGISTER_EVERY_S)
            await register(LEASE_S)

    await first_result(register(LEASE_S))
    try:
        async with background(renew(), name="registration of the batcher"):
            yield
    finally:
        await first_result(register(0.0), asyncio.sleep(_DEREGISTER_S))


def advertised(bound: str, advertise: str) -> str:
    """Return the address at which workers reach a batcher that listens at `bound`.

    >>> advertised("127.0.0.1:7600", ""), advertised("0.0.0.0:7600", "batcher-3")
    ('127.0.0.1:7600', 'batcher-3:7600')
    >>> advertised("0.0.0.0:7600", "lb.example:443")
    'lb.example:443'
    >>> advertised("grpcs://0.0.0.0:7600", "batcher-3")
    'grpcs://batcher-3:7600'
    """
    scheme = SECURE if bound.startswith(SECURE) else ""
    host, _, port = bound.removeprefix(scheme).rpartition(":")
    if "://" in advertise:
        return advertise
    if advertise:
        return scheme + (advertise if ":" in advertise else f"{advertise}:{port}")
    return f"{scheme}{socket.gethostname() if host in _ANY_HOST else host}:{port}"


def _owner() -> str:
    """Return a name that no other replica has, nor this one after a restart."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def _bind(server: grpc.aio.Server, listen: str, *, tls: Tls | None) -> str:
    host, _ = split_address(listen, option="--listen")
    try:
        if tls is None:
            port = server.add_insecure_port(listen)
        else:
            pair = (tls.key.read_bytes(), tls.cert.read_bytes())
            port = server.add_secure_port(listen, grpc.ssl_server_credentials([pair]))
    except RuntimeError as error:
        raise InvalidConfigError(
            "--listen",
            f"{listen!r} cannot be used, another program may listen there: choose "
            f"another port with --listen or TURNSTREAM_BATCHER_PORT; 0 takes a free one",
        ) from error
    return f"{SECURE if tls else ''}{host}:{port}"
