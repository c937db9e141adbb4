"""The events of a run as server-sent events."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
import redis

from testkit import wait_until
from testkit.requests.rest_api import Message, RestApi, content_of, messages_of
from testkit.services.gateway_thread import GatewayThread
from turnstream.errors import StoreUnavailableError
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.rewards import post_reward
from turnstream.store.run.runs import close_run, reopen_run
from turnstream.types import TrajectoryKey
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.rest.runs import events as events_routes
from turnstream_server.keys.store import create_key, revoke_key
from turnstream_server.ledger.admin.deletion import delete_run

_numbers = itertools.count(1)

PROMPTLY_S = 6.0
"""Less than a blocking read, or the time between two heartbeats."""


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats come often."""
    monkeypatch.setattr(events_routes, "HEARTBEAT_S", 0.2)


class Listener:
    """A thread that reads the events of a run until they end.

    Attributes:
        messages: those that came so far.
    """

    def __init__(self, api: RestApi, run: str, *, last: str = "", **query: str) -> None:
        self.messages: list[Message] = []
        self._is_open = threading.Event()
        headers = {"Last-Event-ID": last} if last else {}
        self._thread = threading.Thread(
            target=self._read, args=(api, run, headers, query), daemon=True
        )
        self._thread.start()
        assert self._is_open.wait(20)

    @property
    def has_ended(self) -> bool:
        """Whether the response has ended."""
        return not self._thread.is_alive()

    def wait_for(self, number: int) -> list[Message]:
        """Return the events, once there are so many; well before a read that is repeated."""
        wait_until(lambda: len(self.events) >= number, PROMPTLY_S)
        return self.events

    @property
    def events(self) -> list[Message]:
        """Return the messages without heartbeats."""
        return [message for message in self.messages if message.event != "comment"]

    def _read(self, api: RestApi, run: str, headers: Any, query: Any) -> None:
        path = f"runs/{run}/events"
        with (
            contextlib.suppress(httpx2.TransportError, RuntimeError),  # the client was closed
            api.http.stream("GET", path, headers=headers, params=query) as response,
        ):
            self._is_open.set()
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            for message in messages_of(response):
                self.messages.append(message)


def change(client: redis.Redis, run: str, *, num_events: int = 2) -> None:
    """Write so many events."""
    for number in range(num_events):
        close_run(client, run) if number % 2 == 0 else reopen_run(client, run)


def num_blocked(client: redis.Redis) -> int:
    info: Any = client.info("clients")
    return info["blocked_clients"]


def stored_ids(client: redis.Redis, run: str) -> list[str]:
    found: Any = client.xrange(keys.run_keys(run).events)
    return [entry_id.decode() for entry_id, _ in found]


def test_events_come_in_order_with_named_fields(
    api: RestApi, client: redis.Redis, run: str
) -> None:
    close_run(client, run, "enough", leftover="carry")
    listener = Listener(api, run)
    listener.wait_for(1)
    reopen_run(client, run)

    first, second = listener.wait_for(2)

    assert [first.id, second.id] == stored_ids(client, run)
    at_ms = int(first.id.partition("-")[0])
    head = {"id": first.id, "at_ms": at_ms, "kind": "run_closed"}
    assert first.data == {**head, "reason": "enough", "leftover": "carry"}
    assert (first.event, second.event) == ("run_closed", "run_reopened")
    client.xadd(keys.run_keys(run).events, {"r": b"nonsense"})
    client.xadd(keys.run_keys(run).events, {"x": b""})
    damaged, empty = listener.wait_for(4)[2:]
    assert (damaged.event, empty.event) == ("unreadable", "unreadable")
    assert "no field r" in empty.data["problem"]


def test_every_event_of_a_trajectory_is_sent(api: RestApi, client: redis.Redis, run: str) -> None:
    item = {"group_id": "g/1", "sample": 0, "num_samples": 1, "turn": 0, "prompt_ids": [1]}
    seal = {"awaits_reward": True, "tags": {"task": "x"}}
    api.post(f"runs/{run}/turns", items=[{**item, "response_ids": [2, 3], "seal": seal}])
    post_reward(client, run, TrajectoryKey("g/1", 0), 0.5)

    opened, sealed, posted = [each.data for each in Listener(api, run).wait_for(3)]

    assert (opened["kind"], opened["group_id"], opened["num_samples"]) == ("group_opened", "g/1", 1)
    key = {"group_id": "g/1", "sample": 0, "attempt": 0}
    assert sealed["key"] == posted["key"] == key
    assert (sealed["kind"], sealed["tags"]) == ("trajectory_sealed", {"task": "x"})
    assert sealed["turns"][0]["num_response_tokens"] == 2
    assert (posted["kind"], posted["reward"]) == ("reward_posted", 0.5)


def test_only_wanted_events_are_sent(api: RestApi, client: redis.Redis, run: str) -> None:
    change(client, run, num_events=6)
    listener = Listener(api, run, kinds="run_reopened,version_announced")
    newest = Listener(api, run, start="newest")
    api.post(f"runs/{run}/versions", version=0)

    found = [message.event for message in listener.wait_for(4)]

    assert found == ["run_reopened"] * 3 + ["version_announced"]
    assert [message.event for message in newest.wait_for(1)] == ["version_announced"]
    problem = api.refused("GET", f"runs/{run}/events?kinds=run_closed,closed", 422)
    assert problem["field"] == "kinds"
    assert "'closed'" in problem["detail"]


def test_stream_ends_when_the_run_is_deleted(
    api: RestApi, gateway: GatewayThread, client: redis.Redis, run: str
) -> None:
    listener = Listener(api, run)
    delete_run(client, run)

    wait_until(lambda: listener.has_ended, PROMPTLY_S)
    api.refused("GET", f"runs/{run}/events", 404)
    wait_until(lambda: gateway.num_requests == 0)


@pytest.mark.usefixtures("often")
def test_silent_stream_has_heartbeats_with_the_newest_id(
    api: RestApi, client: redis.Redis, run: str
) -> None:
    """The filter drops all events: a client must not begin far behind when it reconnects."""
    change(client, run, num_events=2)
    listener = Listener(api, run, kinds="group_opened")

    found = wait_until(lambda: listener.messages[1:3])

    assert [message.event for message in found] == ["comment", "comment"][: len(found)]
    assert found[0].id == stored_ids(client, run)[-1]
    assert listener.events == []


def test_malformed_or_deleted_position_is_refused(
    api: RestApi, client: redis.Redis, run: str
) -> None:
    """The planner deletes old events, before a position that its snapshot names."""
    names = keys.run_keys(run)
    change(client, run, num_events=6)
    ids = stored_ids(client, run)
    client.hset(names.snapshot, "before", ids[3])
    client.xtrim(names.events, minid=ids[2], approximate=False)

    def resume(last: str) -> httpx2.Response:
        with api.http.stream(
            "GET", f"runs/{run}/events", headers={"Last-Event-ID": last}
        ) as response:
            if response.status_code == 200:
                assert next(messages_of(response)).id == ids[ids.index(last) + 1]
            return response

    assert [resume(each).status_code for each in ids[:5]] == [410, 410, 200, 200, 200]
    assert [each.id for each in Listener(api, run).wait_for(4)] == ids[2:]
    for last in ("x", "1", "1-", "-1-0", "99999999999999999999-0"):
        response = api.http.get(f"runs/{run}/events", headers={"Last-Event-ID": last})
        assert (response.status_code, response.json()["field"]) == (422, "Last-Event-ID"), last


def test_slow_client_gets_an_error_before_a_gap(
    api: RestApi, client: redis.Redis, run: str
) -> None:
    names = keys.run_keys(run)
    close_run(client, run)
    listener = Listener(api, run)
    listener.wait_for(1)
    pipeline = client.pipeline(transaction=True)  # as if the client had stopped to read in between
    for _ in range(3):
        pipeline.xadd(names.events, {"r": b"x"})
    pipeline.xtrim(names.events, maxlen=1, approximate=False)
    pipeline.eval(
        "local e = redis.call('XRANGE', KEYS[2], '-', '+')[1][1] "
        "redis.call('HSET', KEYS[1], 'before', e)",
        2,
        names.snapshot,
        names.events,
    )
    pipeline.execute()

    error = listener.wait_for(2)[-1]

    assert (error.event, error.data["status"]) == ("error", 410)
    wait_until(lambda: listener.has_ended)


def test_streams_use_no_connection_of_the_gateway(
    new_gateway: Callable[..., GatewayThread], client: redis.Redis, run: str
) -> None:
    with RestApi(new_gateway(max_store_connections=1)) as api:
        before = num_blocked(client)
        listeners = [Listener(api, run) for _ in range(8)]
        close_run(client, run)
        for listener in listeners:
            listener.wait_for(1)
        assert content_of(api.http.get(f"runs/{run}/versions", timeout=5))["newest"] is None
        assert num_blocked(client) - before <= 1


@pytest.mark.usefixtures("often")
def test_stream_of_a_revoked_key_ends(
    server: EmbeddedServer, client: redis.Redis, run: str
) -> None:
    name = f"events-{next(_numbers)}"
    key = create_key(client, name, roles=["read"], runs=[run])
    with GatewayThread(server.url, requires_key=True) as gateway, RestApi(gateway, key=key) as api:
        listener = Listener(api, run)
        revoke_key(client, name)

        error = listener.wait_for(1)[-1]

        assert (error.event, error.data["status"]) == ("error", 401)
        wait_until(lambda: listener.has_ended)


def test_stream_continues_after_a_restart_of_the_store(
    own_server: EmbeddedServer, new_run: Callable[..., str]
) -> None:
    with connect(own_server.url) as client, GatewayThread(own_server.url) as gateway:
        run = new_run(client)
        with RestApi(gateway) as api:
            listener = Listener(api, run)
            close_run(client, run)
            listener.wait_for(1)
            own_server.kill()
            api.refused("GET", f"runs/{run}/events", 503)
            own_server.restart()
            wait_until(lambda: _reopened(client, run))

            found = [message.event for message in listener.wait_for(2)]

    assert found == ["run_closed", "run_reopened"]


def _reopened(client: redis.Redis, run: str) -> bool:
    try:
        return reopen_run(client, run)
    except StoreUnavailableError:
        return False
