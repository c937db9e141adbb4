"""Stores whose settings lose what they acknowledge, beyond what their mode says."""

from __future__ import annotations

from typing import Any

import pytest

from testkit import group, servers
from testkit.stores import Store
from turnstream.errors import InvalidConfigError
from turnstream.generator import Publisher

pytestmark = pytest.mark.redis

own_server = servers.own_server_of_each_kind


@pytest.mark.parametrize(
    ("setting", "value"), [("appendfsync", "no"), ("no-appendfsync-on-rewrite", "yes")]
)
def test_store_with_unsafe_sync_settings_receives_no_writes(
    own_store: Store, setting: str, value: str
) -> None:
    run = own_store.new_run()
    before: Any = own_store.client.config_get(setting)
    (safe,) = before.values()
    own_store.client.config_set(setting, value)

    with Publisher(own_store.url, run) as publisher:
        for name in ("g0", "g1"):
            with pytest.raises(
                InvalidConfigError, match=f"{setting}: the store at .* has '{value}'"
            ):
                publisher.publish(group(name)).result(10)

    own_store.client.config_set(setting, safe)  # the fixtures connect again
