from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit import wait_until
from turnstream.batching.config import BatchingConfig
from turnstream.errors import ConflictError, InvalidConfigError, NotReadyError
from turnstream.records.configs import encode_config
from turnstream.records.events import decode_event, encode_event
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.configs import read_config, revise_config
from turnstream.store.run.runs import (
    close_run,
    create_run,
    list_runs,
    newest_version,
)
from turnstream.store.waits.version_wait import wait_for_version
from turnstream.types import RunClosed, VersionAnnounced
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

NewRun = Callable[..., str]
CONFIG = BatchingConfig(batch_groups=4, mini_batch_groups=2)


def announce(client: redis.Redis, run: str, version: int) -> VersionAnnounced:
    event = VersionAnnounced(version=version, step=version, lineage="main", weights_uri="w")
    entry_id = f"{version + 1}-0"
    client.xadd(keys.run_keys(run).versions, {"r": encode_event(event)}, id=entry_id)
    return event


def test_a_config_that_an_older_release_stored_is_the_same_run(client: redis.Redis) -> None:
    create_run(client, "older", CONFIG)
    name = keys.run_keys("older").config
    stored: Any = client.hget(name, "1")
    known = json.loads(stored)
    del known["lease_s"], known["retain_checkpoints"]
    client.hset(name, "1", json.dumps(known))

    assert create_run(client, "older", CONFIG) == 1
    with pytest.raises(ConflictError, match="another config"):
        create_run(client, "older", dataclasses.replace(CONFIG, lease_s=7.0))


UNREAD: list[tuple[str, dict[str, Any]]] = [
    *(
        ("singleton_advantage", {"estimator": name, "singleton_advantage": "raw"})
        for name in ("gae", "remax", "reinforce_pp")
    ),
    ("turn_discount", {"estimator": "gigpo", "turn_weight": 0.0, "turn_discount": 0.9}),
    ("refill_fallback", {"refill_fallback": "train_short"}),
]


def test_setting_without_effect_is_refused_in_new_runs_and_revisions(client: redis.Redis) -> None:
    for number, (field, settings) in enumerate(UNREAD):
        config = dataclasses.replace(CONFIG, **settings)
        read = {key: value for key, value in settings.items() if key != field}
        create_run(client, f"read-{number}", dataclasses.replace(CONFIG, **read))

        with pytest.raises(InvalidConfigError, match=f"^{field}: .* is not read"):
            create_run(client, "unread", config)
        with pytest.raises(InvalidConfigError, match=f"^{field}: .* is not read"):
            revise_config(client, f"read-{number}", config, from_step=2)


def test_setting_without_effect_of_a_stored_run_stays(client: redis.Redis) -> None:
    older = dataclasses.replace(CONFIG, refill_fallback="train_short")
    create_run(client, "unread", CONFIG)
    client.hset(keys.run_keys("unread").config, "1", encode_config(older))

    assert read_config(client, "unread") == (1, older)
    assert create_run(client, "unread", older) == 1
    longer = dataclasses.replace(older, lease_s=7.0)
    assert revise_config(client, "unread", longer, from_step=2) == 2


def test_run_keeps_its_config_and_state_when_created_again(client: redis.Redis) -> None:
    name = "keeps/its config"
    created = create_run(client, name, CONFIG)
    client.hset(keys.run_keys(name).frontier, "stepped", 3)

    assert created == create_run(client, name, CONFIG) == 1
    assert read_config(client, name) == (1, CONFIG)
    assert name in list_runs(client)
    assert client.hget(keys.run_keys(name).frontier, "stepped") == b"3"


def test_newest_version_is_the_last_announced_and_not_waited_for(
    client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(client)

    before = newest_version(client, run)
    announce(client, run, 0)
    last = announce(client, run, 7)

    assert before is None
    assert newest_version(client, run) == last
    assert wait_for_version(client, run, above=6, timeout_s=0.0) == last
    with pytest.raises(NotReadyError, match=r"no version above 7 within 0\.05 s"):
        wait_for_version(client, run, above=7, timeout_s=0.05)


def test_waiting_for_a_version_ends_when_a_higher_one_is_announced(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(client)
    announce(client, run, 3)
    found: list[VersionAnnounced] = []
    waiter = threading.Thread(
        target=lambda: found.append(
            wait_for_version(connect(server.url), run, above=3, timeout_s=20)
        ),
        daemon=True,
    )

    waiter.start()
    clients: Any = client
    wait_until(lambda: clients.info("clients")["blocked_clients"] == 1, describe="the blocked read")
    announced = announce(client, run, 4)
    waiter.join(20)

    assert found == [announced]


def test_closing_a_run_is_an_event_with_the_reason(client: redis.Redis, new_run: NewRun) -> None:
    run = new_run(client)

    close_run(client, run, "no more prompts")
    close_run(client, run, "again")

    entries: Any = client.xrange(keys.run_keys(run).events)
    assert [decode_event(fields[b"r"]) for _, fields in entries] == [
        RunClosed(reason="no more prompts")
    ]
