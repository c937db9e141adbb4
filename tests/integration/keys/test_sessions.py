"""Session keys in a store: their secret, and the API keys that made them."""

from __future__ import annotations

import time
from typing import cast

import pytest
import redis

from testkit import wait_until_async
from turnstream.errors import AccessDeniedError, StoreUnavailableError, UnknownKeyError
from turnstream.store.client.connection import connect_async
from turnstream.types import TrajectoryKey
from turnstream.types.names import RunId
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.keys import records, sessions
from turnstream_server.keys.records import KeyChecks, KeyLimits, key_id_of, owner_of
from turnstream_server.keys.sessions import SESSIONS, Session, SessionKeys
from turnstream_server.keys.store import KEYS, create_key, revoke_key

pytestmark = pytest.mark.redis

LATE = 2**53 - 1
LOCAL = Session(RunId("demo~2"), TrajectoryKey("g", 0), 8, expires_ms=LATE, owner="own")


async def reason_of(checks: SessionKeys, text: str) -> str:
    """Return why a session key is refused; "" if it is accepted."""
    try:
        await checks.identify(text)
    except (UnknownKeyError, AccessDeniedError) as error:
        return str(error)
    return ""


async def test_session_key_has_the_limits_of_its_api_key_and_no_role(
    own_server: EmbeddedServer, own_client: redis.Redis
) -> None:
    own_client.delete(KEYS, SESSIONS)
    limits = KeyLimits(requests_per_s=5.0)
    maker = create_key(own_client, "ci", roles=["produce"], runs=["demo", "maze"], limits=limits)
    reader = create_key(own_client, "reader", roles=["read"])
    session = LOCAL._replace(key_id=key_id_of(maker))
    other = session._replace(run=RunId("other"))
    of_reader = session._replace(key_id=key_id_of(reader))
    async with (
        connect_async(own_server.url) as client,
        connect_async(own_server.url) as other_client,
    ):
        checks = [
            SessionKeys(each, KeyChecks(each, requires_key=True)) for each in (client, other_client)
        ]
        texts = [await checks[0].sign(each) for each in (session, LOCAL, other, of_reader)]

        assert await checks[1].identify(texts[0]) == session  # one secret for all gateways
        rights = await checks[1].rights_of(session)
        assert rights.roles == frozenset()
        assert (rights.key_id, rights.owner) == (key_id_of(maker), owner_of("ci"))
        assert (rights.runs, rights.limits) == (("demo",), limits)
        reasons = [await reason_of(checks[1], each) for each in texts[1:]]
        assert [each.rpartition(" ")[2] for each in reasons] == ["needs", "'other'", "produce"]

        expired = await checks[0].sign(session._replace(expires_ms=await checks[0].now_ms()))
        assert "expired" in await reason_of(checks[1], expired)

        revoke_key(own_client, "ci")

        async def is_refused() -> bool:
            return "is revoked" in await reason_of(checks[1], texts[0])

        await wait_until_async(is_refused, timeout_s=5, describe="the end of the session key")
        local = SessionKeys(client, KeyChecks(client, requires_key=False))
        assert "is revoked" in await reason_of(local, texts[0])
        assert (await local.rights_of(await local.identify(texts[1]))).owner == "own"
    assert len(cast("bytes", own_client.get(SESSIONS))) == 32


async def test_session_keys_outlive_an_outage_and_the_loss_of_their_secret(
    own_server: EmbeddedServer, own_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = create_key(own_client, "outage", roles=["produce"])
    session = LOCAL._replace(key_id=key_id_of(maker))
    for module in (records, sessions):
        monkeypatch.setattr(module, "_FRESH_S", 0.0)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # the clock of the store decides
    async with connect_async(own_server.url, num_retries=0) as client:
        checks, unread = (
            SessionKeys(client, KeyChecks(client, requires_key=True)) for _ in range(2)
        )
        text = await checks.sign(session)
        assert await reason_of(checks, text) == ""

        own_client.delete(SESSIONS)  # an older copy of the store
        assert await reason_of(checks, text) == ""
        assert await reason_of(unread, text) == ""
        unread = SessionKeys(client, KeyChecks(client, requires_key=True))
        own_server.kill()

        assert await checks.identify(text) == session
        with pytest.raises(StoreUnavailableError):
            await unread.identify(text)
    own_server.restart()
