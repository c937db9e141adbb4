"""The config of a run that is in force, and its revision, read at once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import redis
import redis.asyncio

from turnstream.batching.config import BatchingConfig
from turnstream.errors import CorruptRecordError, RunNotFoundError
from turnstream.records.configs import decode_config
from turnstream.store.client import keys
from turnstream.store.client.run_ids import find_run
from turnstream.store.client.scripts import Command, Script, run_command, run_command_async
from turnstream.store.client.stored_values import reading
from turnstream.types.names import RunId, checked_setting

_READ_CONFIG = Script("read_config", "turnstream.store.run")


def read_config(client: redis.Redis, run: str) -> tuple[int, BatchingConfig]:
    """Return the revision in force and its config."""
    with reading(keys.run_keys(run).config):
        return parse_config(run_command(client, read_config_command(run)), run=run)


async def read_config_async(client: redis.asyncio.Redis, run: str) -> tuple[int, BatchingConfig]:
    """Return the same as `read_config`, for asyncio."""
    with reading(keys.run_keys(run).config):
        return parse_config(await run_command_async(client, read_config_command(run)), run=run)


def open_run(client: redis.Redis, run: str) -> RunId:
    """Return the id of the run that has this name now.

    Damage of its config is left to the caller, as is a run that is gone.
    """
    run_id = find_run(client, run)
    with contextlib.suppress(RunNotFoundError, CorruptRecordError):
        read_config(client, run_id)
    return run_id


async def check_format(client: redis.asyncio.Redis, run: str) -> None:
    """Check a run's format like `open_run`, for asyncio and a run whose id is known."""
    with contextlib.suppress(RunNotFoundError, CorruptRecordError):
        await read_config_async(client, run)


def read_config_command(run: str) -> Command:
    """Return the call that reads the config in force; nothing is sent."""
    checked_setting(run, field="run")
    return _READ_CONFIG((keys.run_keys(run).config,))


def parse_config(reply: Sequence[bytes], *, run: str) -> tuple[int, BatchingConfig]:
    """Return the revision and the config of the reply."""
    revision, text = reply
    return int(revision), decode_config(text, run=run)
