"""A script that meets a damaged counter refuses before its first write, in runs from seeds."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator
from typing import Any

import pytest

from simulator.runs import simulate_all
from simulator.store.lua import ScriptDefectError
from simulator.store.store import Store
from simulator.store.values import StoreError, Stream, Value, Words, ZSet
from testkit.runs.scripts import script, script_files

NUM_RUNS = 80
NUM_TRIES = 5
"""Trials of one damaged field per script."""

INCLUDE = "local function damaged(key, ...)"
DAMAGED = b"\xc5"
GROUPS = {b"planned_groups", b"opened_groups", b"live_groups", b"open_groups"}
UNREACHED = {"discard_event", "discard_dead_letter", "reserve"}
"""Scripts that these runs do not call: integration/ledger/test_dead_letters.py has them."""


def scripts_that_check() -> dict[bytes, str]:
    found: dict[bytes, str] = {}
    for name in script_files():
        found_script = script(name)
        if INCLUDE in found_script.source and not name.startswith("whole_"):
            found[found_script.sha.encode()] = name
    return found


def plain(values: dict[bytes, Value]) -> dict[bytes, Any]:
    return {
        key: [getattr(value, name) for name in value.__slots__]
        if isinstance(value, ZSet | Stream)
        else value
        for key, value in values.items()
    }


class Trials:
    """Runs each script on a copy of the store with one damaged counter.

    Attributes:
        refused: `<script> <key> <field>` of trials that were refused.
        half: trials that failed after a write.
    """

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.half: set[str] = set()
        self._num: collections.Counter[str] = collections.Counter()
        self._names = scripts_that_check()

    def before(self, store: Store, words: Words) -> None:
        """Try the script with each of its counters damaged, a few times each."""
        name = self._names.get(words[1])
        if name is None or store.is_full:
            return
        for key, field in counters(store, words):
            trial = f"{name} {key.rpartition(b':')[2].decode()} {field.decode()}"
            if self._num[trial] < NUM_TRIES:
                self._num[trial] += 1
                self._try(store, words, key, field, trial)

    def _try(self, store: Store, words: Words, key: bytes, field: bytes, trial: str) -> None:
        own = copy.copy(store)
        own.appended, own.expires = None, dict(store.expires)
        own.values = copy.deepcopy({each: store.values[each] for each in keys_of(words, store)})
        own.get(key, dict)[field] = DAMAGED
        before = copy.deepcopy(own.values)
        try:
            EVALUATE(own, words)
        except (StoreError, ScriptDefectError) as error:
            if plain(before) != plain(own.values):
                self.half.add(f"{trial}: {error}")
            if str(error).startswith(f"DAMAGED {key.decode()}, field '{field.decode()}': "):
                self.refused.add(trial)


def keys_of(words: Words, store: Store) -> list[bytes]:
    """Return the existing keys of a call of a script."""
    return [key for key in words[3 : 3 + int(words[2])] if key in store.values]


def counters(store: Store, words: Words) -> Iterator[tuple[bytes, bytes]]:
    for key in keys_of(words, store):
        part, value = key.rpartition(b":")[2], store.values[key]
        if isinstance(value, dict) and part in {b"counts", b"budget", b"reasons"}:
            yield from ((key, field) for field in list(value))
        elif isinstance(value, dict) and part == b"frontier":
            yield from ((key, field) for field in GROUPS & value.keys())


EVALUATE: Any = Store._evaluate  # pyright: ignore[reportPrivateUsage]


@pytest.mark.slow
def test_damaged_counter_is_refused_before_the_first_write(monkeypatch: pytest.MonkeyPatch) -> None:
    # HINCRBY failed half way: a plan was left without its batch, the run finished, and its
    # trajectories were never trained.
    trials = Trials()

    def evaluate(store: Store, words: Words) -> Any:
        trials.before(store, words)
        return EVALUATE(store, words)

    monkeypatch.setattr(Store, "_evaluate", evaluate)

    failed = [verdict for verdict in simulate_all(range(NUM_RUNS)) if verdict.problems]

    assert failed == []
    assert trials.half == set()
    refusing = {trial.partition(" ")[0] for trial in trials.refused}
    assert refusing >= {*scripts_that_check().values()} - UNREACHED
