"""Stores whose settings lose what they acknowledge, beyond what their mode says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from testkit import group
from turnstream.errors import InvalidConfigError
from turnstream.generator import Publisher
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

NewRun = Callable[..., str]


@pytest.mark.parametrize(
    ("setting", "value"), [("appendfsync", "no"), ("no-appendfsync-on-rewrite", "yes")]
)
def test_a_store_that_loses_more_than_its_last_seconds_is_given_nothing(
    own_server: EmbeddedServer, own_client: redis.Redis, new_run: NewRun, setting: str, value: str
) -> None:
    run = new_run(own_client)
    own_client.config_set(setting, value)

    with Publisher(own_server.url, run) as publisher:
        for name in ("g0", "g1"):
            with pytest.raises(InvalidConfigError, match=f"{setting}: the store has '{value}'"):
                publisher.publish(group(name)).result(10)
