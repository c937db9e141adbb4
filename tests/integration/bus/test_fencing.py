"""Every script of a leader refuses a planner that no longer leads, before it writes."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest

import turnstream_server.bus
from turnstream.errors import FencedError
from turnstream_server.bus.leadership.leadership import LeaderScript

pytestmark = pytest.mark.redis


def leader_scripts() -> dict[str, LeaderScript]:
    """Return each LeaderScript of the bus by the name of its script."""
    found: dict[str, LeaderScript] = {}
    for info in pkgutil.walk_packages(turnstream_server.bus.__path__, "turnstream_server.bus."):
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, LeaderScript):
                found[value.name] = value
    return found


SCRIPTS = leader_scripts()


@pytest.mark.parametrize("name", sorted(SCRIPTS))
async def test_script_of_a_fenced_leader_writes_nothing(run: Any, name: str) -> None:
    await run.plan_steps(1)
    before = await run.dump()

    for epoch in (run.leader_epoch - 1, run.leader_epoch + 1):
        with pytest.raises(FencedError, match=f"another planner leads the run, not epoch {epoch}"):
            await SCRIPTS[name].run(run.term_of(epoch))

    assert await run.dump() == before


def test_all_scripts_of_a_leader_are_found() -> None:
    assert len(SCRIPTS) >= 20
