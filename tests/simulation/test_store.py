"""The store in memory replies like a server."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator.store.clients import error_of
from simulator.store.commands import COMMANDS, WRITES
from simulator.store.lua import ScriptDefectError
from simulator.store.store import Store
from simulator.store.values import NotSimulatedError, StoreError
from turnstream.store.client.replies import error_text

FORMS = """
PING
EXISTS key+
UNLINK key+
DEL key+
PEXPIRE key milliseconds
GET key
HGET hash name
HSET hash name text name text
HSETNX hash name text
HMGET hash name+
HGETALL hash
HKEYS hash
HVALS hash
HLEN hash
HEXISTS hash name
HDEL hash name+
HINCRBY hash name number
HSCAN hash 0 COUNT 100
SADD set name+
ZADD zset NX? score name score name
ZADD zset XX LT score name score name
ZREM zset name+
ZSCORE zset name
ZCARD zset
ZRANGE zset number number WITHSCORES?
ZRANGEBYSCORE zset bound bound WITHSCORES?
ZRANGEBYSCORE zset bound bound WITHSCORES? LIMIT 0 2
ZRANGEBYSCORE zset bound bound LIMIT 1 -1
XADD stream new name text
XADD stream MAXLEN 1 new name text
XADD stream MAXLEN 2 new name text name text
XADD stream MAXLEN ~ 99 new name text
XADD stream NOMKSTREAM new name text
XLEN stream
XSETID stream id
XSETID stream 0-18446744073709551615
XRANGE stream low high
XRANGE stream low high COUNT 2
XREVRANGE stream high low
XREVRANGE stream high low COUNT 1
XTRIM stream MINID 1-0
XREAD STREAMS stream id
XREAD COUNT 1 STREAMS stream id
"""
"""Commands: a lower-case word is a key or a value, `+` means up to three, `?` means optional."""
NOT_COMPARED = {"TIME", "SCRIPT", "CONFIG", "INFO"}
"""Each server has its own clock and names."""
KEYS = ["hash", "zset", "stream", "set"]
IDS = ["0-1", "0-2", "0-3", "1-0", "1-1", "2-0", "3"]
VALUES: dict[str, list[Any]] = {
    "key": KEYS,
    "name": ["a", "b", "c", "d"],
    "text": ["", "1", "x", b"\xff\x00", "-7", "99999999999"],
    "number": [str(number) for number in range(-3, 7)],
    "milliseconds": ["1000000", "0", "1.5"],
    "score": ["0", "1", "1.5", "-2", "1700000000123", "3e2"],
    "bound": ["-inf", "+inf", "0", "1", "(1", "1.5", "(-2"],
    "new": IDS,
    "id": ["0-0", *IDS],
    "low": ["-", *IDS, "(0-1", "(1-0"],
    "high": ["+", *IDS, "(0-1", "(1-0"],
}
CALL = b"#!lua\nreturn redis.call(unpack(ARGV))"


@st.composite
def commands(draw: st.DrawFn) -> list[bytes]:
    """A command of one of the forms, sometimes with a key of another type."""
    words: list[Any] = []
    for part in draw(st.sampled_from(FORMS.strip().splitlines())).split():
        part, count = part.rstrip("+?"), part[len(part.rstrip("+?")) :]
        least, most = {"+": (1, 3), "?": (0, 1)}.get(count, (1, 1))
        if part in KEYS and draw(st.integers(0, 9)) == 0:
            part = "key"
        choices = st.sampled_from(VALUES.get(part, [part]))
        words += draw(st.lists(choices, min_size=least, max_size=most))
    return [word.encode() if isinstance(word, str) else word for word in words]


def server_reply(client: redis.Redis, *command: Any) -> Any:
    connection = client.connection_pool.get_connection()
    try:
        connection.send_command(*command)
        return connection.read_response()
    except redis.ResponseError as error:
        return code_of(error)
    finally:
        client.connection_pool.release(connection)


def simulated_reply(store: Store, *command: bytes) -> Any:
    try:
        return store.execute(command)
    except StoreError as error:
        return code_of(error_of(error))
    except ScriptDefectError:
        return "error ERR"


def code_of(error: Any) -> str:
    return f"error {error_text(error).partition(' ')[0]}"


def test_every_simulated_command_is_compared() -> None:
    compared = {form.split()[0] for form in FORMS.strip().splitlines()}

    assert {name.encode() for name in compared | NOT_COMPARED} == set(COMMANDS)
    assert set(COMMANDS) >= WRITES


@pytest.mark.redis
@pytest.mark.hypothesis
def test_random_commands_have_the_replies_of_a_server(client: redis.Redis) -> None:
    sha = str(client.script_load(CALL.decode())).encode()

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(st.tuples(st.booleans(), commands()), min_size=20, max_size=60))
    def compare(drawn: list[tuple[bool, list[bytes]]]) -> None:
        client.unlink(*KEYS)
        store = Store()
        store.execute([b"SCRIPT", b"LOAD", CALL])
        for by_script, command in drawn:
            words = [b"EVALSHA", sha, b"0", *command] if by_script else command
            assert simulated_reply(store, *words) == server_reply(client, *words), command

    try:
        compare()
    finally:
        client.unlink(*KEYS)


@pytest.mark.redis
@pytest.mark.parametrize(
    "body",
    [
        "return {1.9, -1.9, 'a', {2, {'b'}}, true}",
        "return {1, false, 3}",
        "return false",
        "return redis.error_reply('WAIT [1-0] why')",
        "return redis.sha1hex('a')",
        "return redis.pcall('HINCRBY', 'hash', 'f', 'x')['err'] ~= nil",
        "redis.call('HSET', 'hash', 'f', 3, 'g', 1.5) return redis.call('HGETALL', 'hash')",
        "redis.call('HSET', 'hash', 'f', 1700000000123) return redis.call('HGET', 'hash', 'f')",
        "return redis.call('HMGET', 'hash', 'none', 'neither')",
        "return redis.call('HGET', 'hash', 'none') == false",
        "return type(redis.call('PING')) == 'table'",
        'return cjson.decode(\'{"a": [1, 2.5, "b"], "c": null}\').a[3]',
        "return cjson.decode('{\"c\": null}').c == cjson.null",
        "undeclared = 1",
        "return undeclared",
        "return #KEYS + #ARGV",
        "return redis.call('XADD', 'stream', '1-1', 'r', 'x')",
        "return 1 + '2'",
    ],
)
def test_scripts_have_the_replies_of_a_server(client: redis.Redis, body: str) -> None:
    source = f"#!lua\n{body}".encode()
    client.unlink(*KEYS)
    client.script_load(source.decode())
    store, sha = store_with(source)

    real = server_reply(client, "EVALSHA", sha, 0)
    simulated = simulated_reply(store, b"EVALSHA", sha, b"0")

    client.unlink(*KEYS)
    assert simulated == real


def store_with(source: bytes) -> tuple[Store, bytes]:
    store = Store()
    return store, store.execute([b"SCRIPT", b"LOAD", source])


@pytest.mark.parametrize("command", [b"BITCOUNT a", b"ZRANGE a 0 -1 REV", b"XTRIM a MAXLEN 1"])
def test_unknown_command_raises(command: bytes) -> None:
    with pytest.raises(NotSimulatedError):
        Store().execute(command.split())


@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        (b"#!lua\nreturn redis.call('BITCOUNT', 'a')", ScriptDefectError, "BITCOUNT"),
        (b"#!lua flags=no-writes\nreturn redis.call('DEL', 'a')", StoreError, "not allowed"),
    ],
)
def test_script_with_a_forbidden_call_raises(
    source: bytes, error: type[Exception], match: str
) -> None:
    store, sha = store_with(source)

    with pytest.raises(error, match=match):
        store.execute([b"EVALSHA", sha, b"0"])


def test_full_store_runs_only_scripts_with_allow_oom() -> None:
    store, writing = store_with(b"#!lua\nreturn 1")
    allowed = store.execute([b"SCRIPT", b"LOAD", b"#!lua flags=allow-oom\nreturn 1"])
    store.is_full = True

    assert store.execute([b"EVALSHA", allowed, b"0"]) == 1
    with pytest.raises(StoreError, match="OOM"):
        store.execute([b"EVALSHA", writing, b"0"])


def test_key_expires_at_its_time() -> None:
    store = Store()
    store.execute([b"SADD", b"a", b"1"])
    store.execute([b"PEXPIRE", b"a", b"1500"])

    store.now_ms = 1499
    assert store.execute([b"EXISTS", b"a"]) == 1
    store.now_ms = 1500
    assert store.execute([b"EXISTS", b"a"]) == 0


def test_scan_returns_every_remaining_field_once() -> None:
    store = Store()
    fields = {b"f%d" % n: b"%d" % n for n in range(100)}
    store.execute([b"HSET", b"hash", *[word for pair in fields.items() for word in pair]])
    cursor, found = b"0", []
    while True:
        cursor, page = store.execute([b"HSCAN", b"hash", cursor, b"COUNT", b"7"])
        found += page[::2]
        store.execute([b"HDEL", b"hash", *page[::2]])  # a removed field does not move the others
        if cursor == b"0":
            break

    assert sorted(found) == sorted(fields)
