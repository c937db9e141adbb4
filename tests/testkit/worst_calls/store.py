"""A store that the builders of expensive calls fill, and the limits of names."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import redis

import turnstream_server.ledger
from testkit.runs.run_driver import RunCommands
from testkit.runs.scripts import script
from turnstream.batching.config import BatchingConfig
from turnstream.store.client.run_ids import find_run
from turnstream.store.client.scripts import Argument, Command
from turnstream.store.run.runs import create_run
from turnstream_server.ledger.core.scan import RunScript

NAME: Final = "n" * 500
"""About the longest name of a group, a writer or an observer."""

REASON: Final = "r" * 500
"""The longest reason."""

ROWS: Final = 2_000
"""Rows of one write that fills the store."""


class LimitStore:
    """A run in a store, with what the builders write by hand."""

    def __init__(self, client: redis.Redis, name: str, **settings: Any) -> None:
        config = {"batch_groups": 10_000, "mini_batch_groups": 10_000, "max_samples": 4096}
        create_run(client, name, BatchingConfig(**{**config, **settings}))
        self.client = client
        self.run = find_run(client, name)
        self.commands = RunCommands(self.run)
        self.keys = self.commands.keys
        client.hset(self.keys.leader, mapping={"epoch": 1, "owner": "leader"})

    def configured(self, **settings: Any) -> LimitStore:
        """Return another run of the store, with these settings."""
        return LimitStore(self.client, f"{self.run.name}-configured", **settings)

    def fill(self, key: str, fields: Iterable[tuple[str, str | bytes | int]]) -> None:
        """Write fields of a hash."""
        for rows in _rows(fields):
            words = [word for row in rows for word in row]
            self.client.execute_command("HSET", key, *words)

    def score(self, key: str, members: Iterable[tuple[str, float]]) -> None:
        """Write members of a sorted set."""
        for rows in _rows(members):
            words = [word for member, score in rows for word in (score, member)]
            self.client.execute_command("ZADD", key, *words)

    def call(self, name: str, *args: Argument) -> Command:
        """Return the call of a script of the ledger with its keys of the run."""
        return _ledger_scripts()[name](self.run, *args)

    def script(self, name: str, key_names: str, *args: Argument) -> Command:
        """Return the call of a script with these keys of the run."""
        return script(name)([getattr(self.keys, each) for each in key_names.split()], *args)


Build = Callable[[LimitStore], Sequence[Command]]


def worst(builders: dict[str, Build]) -> Callable[[Build], Build]:
    """Return a decorator that registers the builder of the script of its name."""

    def register(build: Build) -> Build:
        builders[build.__name__] = build
        return build

    return register


def cpu_ms(client: redis.Redis) -> float:
    """Return the CPU time of the thread of the server that runs commands."""
    found: Any = client.info("cpu")
    seconds = found["used_cpu_user_main_thread"] + found["used_cpu_sys_main_thread"]
    return seconds * 1_000


def ids_of(count: int, *, group: str = NAME) -> list[str]:
    """Return the ids of the first attempts of as many samples."""
    return [f"{group}/{sample}/0" for sample in range(count)]


def groups_of(count: int) -> list[str]:
    """Return as many long names of groups."""
    return [f"{number}{NAME}" for number in range(count)]


@functools.cache
def _ledger_scripts() -> Mapping[str, RunScript]:
    path = turnstream_server.ledger.__path__
    modules = pkgutil.walk_packages(path, prefix="turnstream_server.ledger.")
    values = (each for module in modules for each in _values_of(module.name))
    return {each.name: each for each in values if isinstance(each, RunScript)}


def _values_of(module: str) -> Iterable[object]:
    return [*vars(importlib.import_module(module)).values()]


def _rows(rows: Iterable[Any]) -> Iterable[list[Any]]:
    page: list[Any] = []
    for row in rows:
        page.append(row)
        if len(page) == ROWS:
            yield page
            page = []
    if page:
        yield page
