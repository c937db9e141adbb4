from __future__ import annotations

from typing import Any

import pytest

from turnstream.errors import ConflictError, FencedError, InvalidConfigError
from turnstream.types import VersionAnnounced
from turnstream_server.bus.sessions.sessions import announce_version, newest_version

pytestmark = pytest.mark.redis


def version(number: int, *, step: int = 0, weights_uri: str = "") -> VersionAnnounced:
    return VersionAnnounced(version=number, step=step, lineage="main", weights_uri=weights_uri)


async def announce(run: Any, announced: VersionAnnounced, *, session_epoch: int = 1) -> None:
    await announce_version(run.client, run.name, announced, session_epoch=session_epoch)


async def test_an_announced_version_is_the_newest_and_an_event_of_the_plan(run: Any) -> None:
    await run.start("s")

    await announce(run, version(0))
    await announce(run, version(4, step=2, weights_uri="file:///weights/4"))

    assert await newest_version(run.client, run.name) == version(
        4, step=2, weights_uri="file:///weights/4"
    )
    assert await run.events() == [
        version(0),
        version(4, step=2, weights_uri="file:///weights/4"),
    ]


async def test_announcing_the_same_again_changes_nothing(run: Any) -> None:
    await run.start("s")
    await announce(run, version(0))
    await announce(run, version(1))
    before = await run.dump()

    await announce(run, version(0))
    await announce(run, version(1))

    assert await run.dump() == before


async def test_a_version_is_never_used_for_other_weights(run: Any) -> None:
    await run.start("s")
    await announce(run, version(5))
    before = await run.dump()

    with pytest.raises(ConflictError, match="version 5 was announced with another content"):
        await announce(run, version(5, step=1))
    with pytest.raises(ConflictError, match="version 4 is not above 5"):
        await announce(run, version(4))

    assert await run.dump() == before


async def test_a_session_that_was_replaced_announces_nothing(run: Any) -> None:
    await run.start("first")
    await run.start("second")

    with pytest.raises(FencedError):
        await announce(run, version(0), session_epoch=1)

    assert await newest_version(run.client, run.name) is None
    assert await run.events() == []


async def test_weights_of_an_abandoned_lineage_are_not_announced(run: Any) -> None:
    # A replica that had not heard of the trainer's going back announced into the dead lineage.
    await run.plan_steps(2)
    await run.commit(await run.start("first"), 1, 2)
    await run.start("back", run.token(1))
    before = await run.dump()

    with pytest.raises(FencedError, match='goes on in lineage "main-1", not in "main"'):
        await announce(run, version(0, step=1), session_epoch=2)

    assert await run.dump() == before


async def test_a_version_below_0_is_refused(run: Any) -> None:
    with pytest.raises(InvalidConfigError, match="version: -1"):
        await announce(run, version(-1))
