from __future__ import annotations

import pytest

from turnstream.errors import InvalidConfigError
from turnstream_server.bus.core.stores import check_version


@pytest.mark.parametrize(
    "facts",
    [
        {"redis_version": "7.0.15"},
        {"redis_version": "8.6"},
        # Valkey says which Redis it stands for, too.
        {"redis_version": "7.2.4", "valkey_version": "8.0.0"},
        {"redis_version": "7.2.4", "valkey_version": "9.1.2"},
    ],
)
def test_a_server_that_is_new_enough_is_accepted(facts: dict[str, str]) -> None:
    check_version(facts, where="redis://there")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"redis_version": "6.2.14"}, r"redis://there is redis 6\.2\.14"),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.6"}, r"is valkey 7\.2\.6"),
        ({"redis_version": "unstable"}, "is redis unstable"),
    ],
)
def test_a_server_that_is_too_old_is_refused_by_its_version(
    facts: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidConfigError, match=said) as caught:
        check_version(facts, where="redis://there")

    assert caught.value.field == "TURNSTREAM_REDIS_URL"
