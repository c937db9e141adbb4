"""The commands of a server that Turnstream uses, over a dictionary, by a clock that is set by hand.

A command or an option that is not known here raises `NotSimulatedError`: better than to guess.
`tests/simulation/test_store.py` compares them with real servers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from simulator.store.commands import COMMANDS
from simulator.store.lua import Scripts
from simulator.store.values import EntryId, NotSimulatedError, StoreError, Value, Words

_WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
_FULL = "OOM command not allowed when used memory > 'maxmemory'."
SCRIPTS = Scripts()
"""One Lua state for every store of this process."""


class Store:
    """A server in memory.

    Attributes:
        is_full: whether it is above `maxmemory`: scripts without allow-oom are refused, and turns
            that are added without a script.
        num_parks: number of times that a leader parked a run.
        appended: called with key, id and fields of each new entry of a stream.
        added_directly: called with the key of a stream that has a new entry without a script.
    """

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.num_added = 0
        self.num_starts = 1
        self.num_parks = 0
        self.is_full = False
        self.appended: Callable[[bytes, EntryId, list[bytes]], None] | None = None
        self.added_directly: Callable[[bytes], None] | None = None
        self.values: dict[bytes, Value] = {}
        self.expires: dict[bytes, float] = {}
        self._next_expiry_ms = math.inf
        self.known_scripts: set[bytes] = set()
        self.scripts = SCRIPTS
        self.appends_only = b"everysec"

    def execute(self, words: Words) -> Any:
        """Return the reply of a command; raises StoreError or NotSimulatedError."""
        name = words[0].upper()
        if name == b"EVALSHA":
            return self._evaluate(words)
        if name != b"XADD":
            return self.call(name, words)
        if self.is_full:
            raise StoreError(_FULL)
        if (entry_id := self.call(name, words)) and self.added_directly is not None:
            self.added_directly(words[1])
        return entry_id

    def call(self, name: bytes, words: Words) -> Any:
        """The same for commands that a script may call too."""
        command = COMMANDS.get(name)
        if command is None:
            raise NotSimulatedError(f"the command {name.decode()}")
        if self.now_ms >= self._next_expiry_ms:
            self._expire()
        if name == b"HSET" and b"parked" in words:
            self.num_parks += 1
        return command(self, words)

    def start_anew(self) -> None:
        """Stop and start with what is here: another start, which knows no script."""
        self.num_starts += 1
        self.known_scripts.clear()

    @property
    def run_id(self) -> bytes:
        """Return the id of this start of the server."""
        return b"%040x" % self.num_starts

    def save(self) -> Any:
        """Return the current content of the disk, for `load`."""
        return copy.deepcopy((self.values, self.expires))

    def load(self, saved: Any) -> None:
        """Restart with the content of the disk, in the same `values`."""
        values, expires = copy.deepcopy(saved)
        self.values.clear()
        self.values.update(values)
        self.expires = expires
        self._next_expiry_ms = 0.0
        self.start_anew()

    def get(self, key: bytes, kind: type[Any]) -> Any:
        """Return the value of a key, or None; raises StoreError for another type."""
        value = self.values.get(key)
        if value is not None and type(value) is not kind:
            raise StoreError(_WRONG_TYPE)
        return value

    def make(self, key: bytes, kind: type[Any]) -> Any:
        """The value of a key, made where there is none."""
        value = self.get(key, kind)
        if value is None:
            value = self.values[key] = kind()
        return value

    def drop(self, key: bytes) -> bool:
        """Whether the key was there."""
        self.expires.pop(key, None)
        return self.values.pop(key, None) is not None

    def expire_at(self, key: bytes, end_ms: float) -> None:
        """Drop a key at a time."""
        self.expires[key] = end_ms
        self._next_expiry_ms = min(self._next_expiry_ms, end_ms)

    def _expire(self) -> None:
        for key in [key for key, end_ms in self.expires.items() if end_ms <= self.now_ms]:
            self.drop(key)
        self._next_expiry_ms = min(self.expires.values(), default=math.inf)

    def _evaluate(self, words: Words) -> Any:
        sha, num_keys = words[1], int(words[2])
        if sha not in self.known_scripts:
            raise StoreError("NOSCRIPT No matching script. Please use EVAL.")
        script = self.scripts.by_sha[sha]
        self.scripts.carry_out = self.call
        if self.is_full and not script.allows_oom and not script.is_read_only:
            raise StoreError(_FULL)
        return self.scripts.run(script, num_keys, words[3:])
