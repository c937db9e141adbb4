"""Limits multiplied: no accepted call of a script stops the store for more than 50 ms.

Each call has the largest accepted input of all arguments at once, against a store at its limits.
The store time is the CPU time of the server's own thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

import pytest
import redis

from testkit.worst_calls import CONSTANT, WORST, has_loop, script_names
from testkit.worst_calls.store import LimitStore, cpu_ms
from turnstream.store.client.scripts import Command, run_command

pytestmark = pytest.mark.redis

BOUND_MS: Final = 50.0
TRIES: Final = 6
"""Most measurements, of which the shortest counts: others use the caches of a busy machine."""

REFERENCES: Final = {
    "for i = 1, 100000 do redis.call('HGET', KEYS[1], i) end": 40.0,
    "for i = 1, 30000 do redis.call('HSET', KEYS[1], 'group/' .. i, 'r' .. i * 7) end "
    "redis.call('DEL', KEYS[1])": 85.0,
}
"""Scripts and their CPU time, in ms, on the machine for which the bound is: one computes, the other
takes memory. Others slow a machine down in both ways."""

_numbers = itertools.count(1)


def test_every_script_has_its_most_expensive_call_or_a_reason() -> None:
    missing = script_names() - {*WORST, *CONSTANT}
    unknown = {*WORST, *CONSTANT} - script_names()
    hidden = {name for name in CONSTANT if has_loop(name)}

    assert not missing, f"add the most expensive accepted call of {missing} to testkit/worst_calls"
    assert not unknown, f"testkit/worst_calls has entries of {unknown}, which are no scripts"
    assert not hidden, f"{hidden} loop: testkit/worst_calls needs their most expensive call"
    assert not WORST.keys() & CONSTANT.keys()
    assert all(CONSTANT.values())


@pytest.mark.parametrize("name", sorted(WORST))
def test_most_expensive_call_stays_below_the_bound(
    client: redis.Redis,
    record_property: Callable[[str, object], None],
    name: str,
) -> None:
    spent: list[list[float]] = []
    for _ in range(TRIES):
        store = LimitStore(client, f"worst-{next(_numbers)}")
        commands = WORST[name](store)
        assert {each.script.name for each in commands} == {name}
        slowness = measure_slowness(client)
        spent.append([store_ms(client, each) / slowness for each in commands])
        client.flushall()
        if max(spent[-1]) < BOUND_MS:
            break

    shortest = [min(times) for times in zip(*spent, strict=True)]
    record_property("store_ms", shortest)
    assert max(shortest) < BOUND_MS, f"{name} stops the store for {shortest} ms"


def measure_slowness(client: redis.Redis) -> float:
    """Return the factor by which the machine is slower now than that of the bound; 1.0 at least."""
    factors = [1.0]
    for script, usual_ms in REFERENCES.items():
        before = cpu_ms(client)
        client.eval(script, 1, "reference")
        factors.append((cpu_ms(client) - before) / usual_ms)
    return max(factors)


def store_ms(client: redis.Redis, command: Command) -> float:
    """Return the CPU time of a call in the server; it must be accepted."""
    client.script_load(command.script.source)
    before = cpu_ms(client)
    run_command(client, command)
    return cpu_ms(client) - before
