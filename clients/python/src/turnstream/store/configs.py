"""The config of a run that is in force, and its revision, as they are at one moment."""

from __future__ import annotations

from collections.abc import Sequence

import redis
import redis.asyncio

from turnstream.batching.config import BatchingConfig
from turnstream.records.configs import decode_config
from turnstream.store import keys
from turnstream.store.scripts import Command, Script, run_command, run_command_async
from turnstream.store.stored import reading
from turnstream.types.names import checked_setting

_READ_CONFIG = Script("read_config")


def read_config(client: redis.Redis, run: str) -> tuple[int, BatchingConfig]:
    """The config of a run that is in force, and its revision.

    Raises:
        CorruptRecordError: the config is damaged.
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
    with reading(keys.run_keys(run).config):
        return parse_config(run_command(client, read_config_command(run)))


async def read_config_async(client: redis.asyncio.Redis, run: str) -> tuple[int, BatchingConfig]:
    """The same as `read_config`, for asyncio."""
    with reading(keys.run_keys(run).config):
        return parse_config(await run_command_async(client, read_config_command(run)))


def read_config_command(run: str) -> Command:
    """The call that reads the config in force; nothing is sent."""
    checked_setting(run, field="run")
    return _READ_CONFIG((keys.run_keys(run).config,))


def parse_config(reply: Sequence[bytes]) -> tuple[int, BatchingConfig]:
    """The revision and the config of the reply."""
    revision, text = reply
    return int(revision), decode_config(text)
