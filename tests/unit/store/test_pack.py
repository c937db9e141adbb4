from __future__ import annotations

from redis.connection import Connection

from testkit.scripts import script
from turnstream.store.client.scripts import pack


def test_commands_are_packed_as_the_client_packs_them() -> None:
    payload = bytes(range(256)) * 40
    calls = [
        script("append")(["ts:{r/ä}:turns"], 1, "2", payload, b"").words,
        ("SCRIPT", "LOAD", "return 'ö'"),
    ]

    packed = pack(calls)

    assert packed == b"".join(b"".join(Connection().pack_command(*words)) for words in calls)


def test_a_view_of_bytes_is_packed_like_the_bytes() -> None:
    assert pack([("SET", memoryview(b"value"))]) == pack([("SET", b"value")])
