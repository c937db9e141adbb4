"""Commands that create, list and revoke API keys."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, cast

from rich.console import Console

from turnstream.errors import InvalidConfigError
from turnstream.store.client.connection import connect
from turnstream_server.keys.records import ROLES, ApiKey, KeyLimits, Role
from turnstream_server.keys.store import create_key, list_keys, revoke_key
from turnstream_server.screen import make_table

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DURATION: Final = re.compile(r"([0-9]{1,6})([smhdw])")


def create(
    url: str,
    name: str,
    *,
    roles: Sequence[str],
    runs: Sequence[str],
    expires: str | None,
    limits: KeyLimits,
) -> str:
    """Create a key, and return it. Errors as of `create_key`."""
    for role in roles:
        if role not in ROLES:
            raise InvalidConfigError("--role", f"{role!r} is not one of {', '.join(ROLES)}")
    with connect(url) as client:
        return create_key(
            client,
            name,
            roles=cast("Sequence[Role]", roles),
            runs=runs,
            expires_s=None if expires is None else seconds_of(expires),
            limits=limits,
        )


def seconds_of(duration: str) -> float:
    """Return the seconds of a duration.

    >>> seconds_of("90s"), seconds_of("30d")
    (90, 2592000)
    """
    found = _DURATION.fullmatch(duration)
    if found is None:
        raise InvalidConfigError("--expires", f"{duration!r} is not a time such as 12h, 30d or 8w")
    return int(found[1]) * _UNITS_S[found[2]]


def read_keys(url: str) -> list[dict[str, Any]]:
    """Return all keys in plain values, without the keys themselves and their hashes."""
    with connect(url) as client:
        return [_plain(key) for key in list_keys(client)]


def print_keys(content: list[dict[str, Any]], console: Console) -> None:
    """Print the keys of `read_keys`."""
    rows = [
        (
            key["name"],
            " ".join(key["roles"]),
            " ".join(key["runs"]) or "all",
            key["created"],
            _end(key),
            " ".join(f"{name}={value:g}" for name, value in key["limits"].items()),
        )
        for key in content
    ]
    columns = ("key", "roles", "runs", "created", "expires", "limits")
    console.print(make_table(columns, rows, title="API keys"))


def revoke(url: str, name: str) -> None:
    """Delete the keys of a name. Errors as of `revoke_key`."""
    with connect(url) as client:
        revoke_key(client, name)


def _plain(key: ApiKey) -> dict[str, Any]:
    limits = {name: value for name, value in key.limits._asdict().items() if value is not None}
    return {
        "name": key.name,
        "roles": sorted(key.roles),
        "runs": list(key.runs),
        "created": _time(key.created_ms),
        "expires": None if key.expires_ms is None else _time(key.expires_ms),
        "has_expired": key.expires_ms is not None and key.expires_ms <= time.time() * 1000,
        "limits": limits,
    }


def _end(key: dict[str, Any]) -> str:
    if key["expires"] is None:
        return "never"
    return f"{key['expires']} (expired)" if key["has_expired"] else key["expires"]


def _time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
