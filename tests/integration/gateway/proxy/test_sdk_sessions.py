"""Sessions of the SDK: they end the trajectory of their agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import turnstream
from testkit.services.agents import Agent
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from turnstream.errors import InvalidTurnError, RejectedError, StoreUnavailableError
from turnstream.store.waits.wait_reasons import UNSEALED
from turnstream.types import SealedTrajectory


@pytest.fixture
def opened(gateway: GatewayThread, run: str) -> Iterator[turnstream.Run]:
    """The run, of a connection to the gateway."""
    with turnstream.connect(gateway.base_url) as service:
        yield service.run(run)


def agent_of(session: Any) -> Agent:
    """Return the agent with the environment of a session."""
    environment = session.environment
    return Agent(environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"])


def seals(reader: RunReader) -> dict[int, SealedTrajectory]:
    events = [each for each in reader.events() if isinstance(each, SealedTrajectory)]
    return {each.key.sample: each for each in events}


def test_session_is_sealed_or_abandoned_by_its_owner(
    opened: turnstream.Run, reader: RunReader, caplog: pytest.LogCaptureFixture
):
    with opened.publisher() as publisher:
        group = publisher.group("g", 8)
        sealed, failed, left, of_agent = [group.session(sample) for sample in (0, 1, 2, 4)]
        trusted, unused = group.session(3, may_seal=False), group.session(5)
    for each in (sealed, failed, trusted, of_agent):
        agent_of(each).ask("hi")
    with sealed:
        with pytest.raises(InvalidTurnError, match="siblings: 'all' is not one of train"):
            sealed.seal(siblings="all")
        sealed.seal(1.5, tags={"a": "b"}, status="truncated", siblings="train")
        with pytest.raises(RejectedError, match="g/0/0 is sealed or abandoned"):
            sealed.seal()
    with pytest.raises(KeyError), failed:
        raise KeyError("step")
    with left:
        pass
    with trusted:
        refused = agent_of(trusted).send("POST", "session/end", json={"reward": 9.0})
        trusted.seal(awaits_reward=True)
    with of_agent:
        agent_of(of_agent).send("POST", "session/end", json={"reward": 0.5}).raise_for_status()
    with unused, pytest.raises(InvalidTurnError, match="turns"):
        unused.seal(1.0)

    found = seals(reader)
    assert (found[0].reward, found[0].tags, found[0].status) == (1.5, {"a": "b"}, "truncated")
    assert (found[3].awaits_reward, found[4].reward, refused.status_code) == (True, 0.5, 403)
    ledger = {name: entry.partition(":") for name, entry in reader.ledger().items()}
    assert ledger["g/1/0"] == ("abandoned", ":", "KeyError: 'step'")
    assert ledger["g/2/0"] == ("abandoned", ":", UNSEALED)
    assert ledger["g/5/0"][0] == "abandoned"
    assert "sample 2 left without a seal" in caplog.text


async def test_async_session_is_the_same(opened: turnstream.Run, reader: RunReader):
    async with opened.async_publisher() as publisher:
        group = publisher.group("g", 2)
        async with await group.session(0, expires_in_s=60) as session:
            agent_of(session).ask("hi")
            await session.seal(1.0)
        async with await group.session(1) as session:
            await session.abandon("no")

    assert seals(reader)[0].reward == 1.0
    assert reader.ledger()["g/1/0"] == "abandoned:no"


def test_session_whose_gateway_is_away_can_be_sealed_later(
    opened: turnstream.Run,
    gateway: GatewayThread,
    new_gateway: Callable[..., GatewayThread],
    caplog: pytest.LogCaptureFixture,
):
    with opened.publisher() as publisher:
        session = publisher.group("g", 1).session()
    agent_of(session).ask("hi")
    gateway.stop()

    with pytest.raises(StoreUnavailableError):
        session.seal(reward=1.0)
    assert not session.has_ended
    with pytest.raises(KeyError), session:
        raise KeyError("step")

    assert "session g/0/0 was not abandoned" in caplog.text
