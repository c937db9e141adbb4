from __future__ import annotations

from typing import Any

import pytest
import redis.asyncio

from turnstream.errors import InvalidConfigError, ObserverExpiredError, RunNotFoundError
from turnstream.testing import wait_until_async
from turnstream_server.bus.observers import declare_observer, note_observed

pytestmark = pytest.mark.redis


async def declare(
    run: Any, observer: str = "o", *, first_step: int | None = None, expiry_s: float = 60.0
) -> int:
    return await declare_observer(
        run.client, run.name, observer=observer, first_step=first_step, expiry_s=expiry_s
    )


async def test_a_new_observer_begins_where_it_says_or_behind_the_last_stepped_batch(
    run: Any,
) -> None:
    await run.client.hset(run.keys.frontier, "stepped", 4)

    assert await declare(run, "from the start", first_step=1) == 1
    assert await declare(run, "from here") == 5


async def test_an_observer_comes_back_behind_what_it_has_seen(run: Any) -> None:
    await declare(run, first_step=1)
    await note_observed(run.client, run.name, observer="o", step=7)
    await note_observed(run.client, run.name, observer="o", step=3)

    again = await declare(run, first_step=1)

    assert again == 8


async def test_a_silent_observer_is_forgotten_and_told_so(run: Any) -> None:
    await declare(run, expiry_s=0.05)
    await wait_until_async(lambda: is_expired(run))

    with pytest.raises(ObserverExpiredError, match=r"observer o was silent for more than 0.05 s"):
        await note_observed(run.client, run.name, observer="o", step=1)
    with pytest.raises(ObserverExpiredError, match="observer o was never declared"):
        await note_observed(run.client, run.name, observer="o", step=1)


async def is_expired(run: Any) -> bool:
    """Whether the server's clock is beyond the expiry of the observer "o"."""
    found = await run.client.hget(run.keys.observers, "o")
    seconds, microseconds = await run.client.time()
    return int(found.split(b":")[1]) <= seconds * 1000 + microseconds // 1000


async def test_an_expired_observer_that_is_declared_anew_begins_anew(run: Any) -> None:
    await declare(run, first_step=8, expiry_s=0.02)
    await wait_until_async(lambda: is_expired(run))

    assert await declare(run, first_step=2) == 2


async def test_every_call_prolongs_the_life_of_an_observer(run: Any) -> None:
    await declare(run, expiry_s=60)
    before = await run.client.hget(run.keys.observers, "o")

    async def is_prolonged() -> bool:
        await note_observed(run.client, run.name, observer="o")
        return await run.client.hget(run.keys.observers, "o") > before

    assert await note_observed(run.client, run.name, observer="o") == 60
    await wait_until_async(is_prolonged)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"observer": ""}, "observer"),
        ({"first_step": 0}, "first_step"),
        ({"expiry_s": 0.0}, "expiry_s"),
        ({"expiry_s": float("nan")}, "expiry_s"),
    ],
)
async def test_an_observer_that_cannot_be_is_refused(run: Any, wrong: Any, field: str) -> None:
    with pytest.raises(InvalidConfigError, match=field):
        await declare(run, **wrong)

    assert not await run.client.exists(run.keys.observers)


async def test_a_run_that_is_not_there_cannot_be_observed(
    async_client: redis.asyncio.Redis,
) -> None:
    with pytest.raises(RunNotFoundError):
        await declare_observer(
            async_client, "no such run", observer="o", first_step=None, expiry_s=1
        )
