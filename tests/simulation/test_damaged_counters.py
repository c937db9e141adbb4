"""A script that meets a damaged counter refuses before its first write, in runs from seeds."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator
from typing import Any

import pytest

from simulator.lua import ScriptDefectError
from simulator.runs import simulate_all
from simulator.store import Store
from simulator.values import StoreError, Stream, Value, Words, ZSet
from testkit.scripts import script, script_files

NUM_RUNS = 80
NUM_TRIES = 5
"""Trials of one damaged field per script."""

INCLUDE = "local function damaged(key, ...)"
DAMAGED = b"\xc5"
GROUPS = {b"planned_groups", b"opened_groups", b"live_groups", b"open_groups"}
UNREACHED = {"discard_event", "discard_dead_letter", "reject_events", "reserve"}
"""Scripts that these runs do not call: integration/bus/test_dead_letters.py has them."""


def scripts_that_check() -> dict[bytes, str]:
    found: dict[bytes, str] = {}
    for name in script_files():
        found_script = script(name)
        if INCLUDE in found_script.source and not name.startswith("whole_"):
            found[found_script.sha.encode()] = name
    return found


def plain(value: Value | None) -> Any:
    if isinstance(value, ZSet):
        return copy.copy(value.order)
    if isinstance(value, Stream):
        return copy.copy(value.ids), value.last_id
    return copy.copy(value)


class Trials:
    """Runs each script with one counter damaged, takes that back, and runs it as it was called.

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
        called = words[3 : 3 + int(words[2])]
        for key, field in counters(store, called):
            trial = f"{name} {key.rpartition(b':')[2].decode()} {field.decode()}"
            if self._num[trial] < NUM_TRIES:
                self._num[trial] += 1
                self._try(store, words, called, key, field, trial)

    def _try(
        self,
        store: Store,
        words: Words,
        called: Words,
        key: bytes,
        field: bytes,
        trial: str,
    ) -> None:
        kept = {each: copy.deepcopy(store.values.get(each)) for each in called}
        told, store.appended = store.appended, None
        num_added, num_parks = store.num_added, store.num_parks
        store.get(key, dict)[field] = DAMAGED
        before = {each: plain(store.values.get(each)) for each in called}
        try:
            EVALUATE(store, words)
        except (StoreError, ScriptDefectError) as error:
            if before != {each: plain(store.values.get(each)) for each in called}:
                self.half.add(f"{trial}: {error}")
            if str(error).startswith(f"DAMAGED {key.decode()}, field '{field.decode()}': "):
                self.refused.add(trial)
        for each, value in kept.items():
            store.values.pop(each, None)
            if value is not None:
                store.values[each] = value
        store.appended, store.num_added, store.num_parks = told, num_added, num_parks


def counters(store: Store, called: Words) -> Iterator[tuple[bytes, bytes]]:
    for key in called:
        part = key.rpartition(b":")[2]
        value = store.values.get(key)
        if not isinstance(value, dict):
            continue
        if part in {b"counts", b"budget", b"reasons"}:
            yield from ((key, field) for field in list(value))
        elif part == b"frontier":
            yield from ((key, field) for field in GROUPS & value.keys())


EVALUATE: Any = Store._evaluate  # pyright: ignore[reportPrivateUsage]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_damaged_counter_is_refused_before_the_first_write(monkeypatch: pytest.MonkeyPatch) -> None:
    # HINCRBY failed half way: write_manifest left a plan without its batch, the run finished, and
    # its trajectories were never trained.
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
