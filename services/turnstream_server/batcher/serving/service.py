"""One batcher process: the gRPC server and a planner per run, until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import grpc.aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from turnstream.errors import InvalidConfigError
from turnstream.store.client.connection import connect_async
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.planner.event_loop import task_group
from turnstream_server.batcher.planner.parking import ParkedRuns
from turnstream_server.batcher.planner.reason_cache import ReasonCache
from turnstream_server.batcher.planner.renewal import LeadershipKeeper
from turnstream_server.batcher.serving.calls import handlers
from turnstream_server.batcher.serving.gc_tuning import tune_process
from turnstream_server.batcher.serving.health import StoreHealth
from turnstream_server.batcher.serving.options import BatcherOptions
from turnstream_server.batcher.serving.registration import Registration, advertised
from turnstream_server.batcher.serving.registry import RunRegistry
from turnstream_server.batcher.serving.run_discovery import RunDiscovery
from turnstream_server.batcher.serving.servicer import SERVICE, BatchesServicer

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
    # Clients ping every 2 s while a call is open, to notice a frozen replica.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)


def run_batcher(options: BatcherOptions) -> None:
    """Serve until SIGTERM or SIGINT, then stop cleanly.

    Raises:
        InvalidConfigError: the address to listen on is taken, or none.
        StoreUnavailableError: the store cannot be reached at the start.
    """
    asyncio.run(_serve_until_signal(options))


async def _serve_until_signal(options: BatcherOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(options) as address:
        tune_process()
        if options.address_file is not None:
            _write_whole(options.address_file, address)
        await stop.wait()
        logger.info("batcher at %s stops", address)


@contextlib.asynccontextmanager
async def serving(options: BatcherOptions) -> AsyncIterator[str]:
    """Serve until the end of the block; yield the bound "host:port".

    Raises:
        InvalidConfigError: the address to listen on is taken, or none.
        StoreUnavailableError: the store cannot be reached at the start.
    """
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect_async(options.redis_url))
        assembler = Assembler(options.redis_url, max_cache_bytes=options.cache_bytes)
        stack.push_async_callback(assembler.close)
        keeper = LeadershipKeeper(options.redis_url, owner=_owner(), lease_s=options.leader_lease_s)
        stack.push_async_callback(keeper.close)
        reason_cache = ReasonCache(options.redis_url)
        stack.callback(reason_cache.close)
        parked = ParkedRuns(options.redis_url, after_s=options.park_after_s)
        stack.push_async_callback(parked.close)
        tasks = await stack.enter_async_context(task_group())
        runs = RunRegistry(
            client,
            assembler,
            tasks,
            keeper=keeper,
            upkeep=options.upkeep,
            parked=parked,
            read_reasons=reason_cache.reasons,
        )
        stack.push_async_callback(runs.close)
        discovery = RunDiscovery(options.redis_url, runs.take_part)
        stack.push_async_callback(discovery.close)
        await discovery.start()
        health = StoreHealth(options.redis_url, SERVICE)
        stack.push_async_callback(health.close)
        await health.start()
        servicer = BatchesServicer(client, runs.find, assembler, wait_max_s=options.get_wait_max_s)
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        server.add_generic_rpc_handlers((handlers(servicer),))
        add_HealthServicer_to_server(health, server)
        address = _bind(server, options.listen)
        await server.start()
        stack.push_async_callback(_stop, server, servicer, runs, health, options.shutdown_grace_s)
        registration = Registration(options.redis_url, advertised(address, options.advertise))
        stack.push_async_callback(registration.close)
        await registration.start()
        logger.info("batcher listens at %s", address)
        yield address


async def _stop(
    server: grpc.aio.Server,
    servicer: BatchesServicer,
    runs: RunRegistry,
    health: StoreHealth,
    grace_s: float,
) -> None:
    """Finish transfers in progress; refuse calls that wait for a batch."""
    await health.enter_graceful_shutdown()
    runs.dismiss()
    await server.stop(grace_s)
    await servicer.close()


def _owner() -> str:
    """Return a name that no other replica has, nor this one after a restart."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def _bind(server: grpc.aio.Server, listen: str) -> str:
    host, _, number = listen.rpartition(":")
    if not host or not number.isdecimal():
        raise InvalidConfigError(
            "--listen", f"{listen!r} is not HOST:PORT, such as 127.0.0.1:7600; port 0: a free one"
        )
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise InvalidConfigError(
            "--listen",
            f"{listen!r} cannot be used, another program may listen there: choose "
            f"another port with --listen or TURNSTREAM_BATCHER_PORT; 0 takes a free one",
        ) from error
    return f"{host}:{port}"


def _write_whole(path: Path, text: str) -> None:
    """Write a file that no reader sees half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
