"""The store in memory says what a server says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator.clients import error_of
from simulator.commands import COMMANDS
from simulator.lua import ScriptDefectError
from simulator.store import WRITES, Store
from simulator.values import NotSimulatedError, StoreError
from turnstream.store.client.replies import error_text

HASH, ZSET, STREAM, SET, STRING = b"hash", b"zset", b"stream", b"set", b"string"
KEYS = [HASH, ZSET, STREAM, SET, STRING]
CALL = b"#!lua\nreturn redis.call(unpack(ARGV))"
NOT_COMPARED = {
    b"TIME",  # the clock of the simulation is set by hand
    b"PTTL",
    b"SCRIPT",
    b"CONFIG",
    b"INFO",  # each has a name of its own
}

names = st.sampled_from([b"a", b"b", b"c", b"d"])
texts = st.sampled_from([b"", b"1", b"x", b"\xff\x00", b"-7", b"99999999999"])
numbers = st.integers(-3, 6).map(lambda n: b"%d" % n)
scores = st.sampled_from([b"0", b"1", b"1.5", b"-2", b"1700000000123", b"3e2"])
bounds = st.sampled_from([b"-inf", b"+inf", b"0", b"1", b"(1", b"1.5", b"(-2"])
ids = st.sampled_from([b"0-1", b"0-2", b"0-3", b"1-0", b"1-1", b"2-0", b"3", b"0-0"])
low_ids = st.one_of(st.just(b"-"), ids, st.sampled_from([b"(0-1", b"(1-0"]))
high_ids = st.one_of(st.just(b"+"), ids, st.sampled_from([b"(0-1", b"(1-0"]))
counts = st.sampled_from([(), (b"COUNT", b"1"), (b"COUNT", b"2")])


def words(*parts: Any) -> st.SearchStrategy[list[bytes]]:
    """Commands of these parts: a word stands for itself, a strategy may give several."""
    drawn = [part if isinstance(part, st.SearchStrategy) else st.just(part) for part in parts]
    return st.tuples(*drawn).map(_flat)


def _flat(parts: Sequence[Any]) -> list[bytes]:
    flat: list[bytes] = []
    for part in parts:
        flat += [part] if isinstance(part, bytes) else _flat(part)
    return flat


def some(*parts: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[Any]:
    return st.lists(st.tuples(*parts), min_size=1, max_size=most)


any_key = st.sampled_from(KEYS)
BY_COMMAND: dict[bytes, st.SearchStrategy[list[bytes]]] = {
    b"EXISTS": words(b"EXISTS", some(any_key)),
    b"UNLINK": words(b"UNLINK", some(any_key)),
    b"DEL": words(b"DEL", some(any_key)),
    b"PING": words(b"PING"),
    b"PEXPIRE": words(b"PEXPIRE", any_key, st.sampled_from([b"1000000", b"0", b"1.5"])),
    b"GET": words(b"GET", STRING),
    b"SET": words(b"SET", STRING, texts, st.sampled_from([(), (b"NX",)])),
    b"HGET": words(b"HGET", HASH, names),
    b"HSET": words(b"HSET", HASH, some(names, texts)),
    b"HSETNX": words(b"HSETNX", HASH, names, texts),
    b"HMGET": words(b"HMGET", HASH, some(names)),
    b"HGETALL": words(b"HGETALL", HASH),
    b"HKEYS": words(b"HKEYS", HASH),
    b"HVALS": words(b"HVALS", HASH),
    b"HLEN": words(b"HLEN", HASH),
    b"HEXISTS": words(b"HEXISTS", HASH, names),
    b"HDEL": words(b"HDEL", HASH, some(names)),
    b"HINCRBY": words(b"HINCRBY", HASH, names, numbers),
    b"HSCAN": words(b"HSCAN", HASH, b"0", b"COUNT", b"100"),
    b"SADD": words(b"SADD", SET, some(names)),
    b"ZADD": words(b"ZADD", ZSET, st.sampled_from([(), (b"NX",)]), some(scores, names)),
    b"ZREM": words(b"ZREM", ZSET, some(names)),
    b"ZSCORE": words(b"ZSCORE", ZSET, names),
    b"ZCARD": words(b"ZCARD", ZSET),
    b"ZRANGE": words(b"ZRANGE", ZSET, numbers, numbers, st.sampled_from([(), (b"WITHSCORES",)])),
    b"ZRANGEBYSCORE": words(
        b"ZRANGEBYSCORE",
        ZSET,
        bounds,
        bounds,
        st.sampled_from([(), (b"WITHSCORES",)]),
        st.sampled_from([(), (b"LIMIT", b"0", b"2"), (b"LIMIT", b"1", b"-1")]),
    ),
    b"ZREMRANGEBYSCORE": words(b"ZREMRANGEBYSCORE", ZSET, bounds, bounds),
    b"XADD": words(
        b"XADD",
        STREAM,
        st.sampled_from([(), (b"MAXLEN", b"1"), (b"MAXLEN", b"2"), (b"MAXLEN", b"~", b"99")]),
        ids,
        some(names, texts, most=2),
    ),
    b"XRANGE": words(b"XRANGE", STREAM, low_ids, high_ids, counts),
    b"XREVRANGE": words(b"XREVRANGE", STREAM, high_ids, low_ids, counts),
    b"XLEN": words(b"XLEN", STREAM),
    b"XDEL": words(b"XDEL", STREAM, some(ids)),
    b"XTRIM": words(b"XTRIM", STREAM, st.sampled_from([(b"MAXLEN", b"1"), (b"MINID", b"1-0")])),
    b"XREAD": words(b"XREAD", counts, b"STREAMS", STREAM, ids),
}
wrong_types = st.tuples(st.one_of(*BY_COMMAND.values()), any_key).map(
    lambda drawn: [drawn[1] if word in KEYS else word for word in drawn[0]]
)
commands = st.one_of(*BY_COMMAND.values(), wrong_types)
calls = st.lists(st.tuples(st.booleans(), commands), min_size=1, max_size=40)


class Both:
    """A server and the store in memory, told the same."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._store = Store()
        self.sha = str(client.script_load(CALL.decode())).encode()
        assert self._store.execute([b"SCRIPT", b"LOAD", CALL]) == self.sha

    def say(self, command: list[bytes], *, by_script: bool) -> tuple[Any, Any]:
        """Both replies, in the same form."""
        if by_script:
            command = [b"EVALSHA", self.sha, b"0", *command]
        return self._real(command), self._simulated(command)

    def _real(self, command: list[bytes]) -> Any:
        connection = self._client.connection_pool.get_connection()
        try:
            connection.send_command(*command)
            return connection.read_response()
        except redis.ResponseError as error:
            return _code(error)
        finally:
            self._client.connection_pool.release(connection)

    def _simulated(self, command: list[bytes]) -> Any:
        try:
            reply = self._store.execute(command)
        except StoreError as error:
            return _code(error_of(error))  # type: ignore[arg-type]
        return reply


def _code(error: redis.ResponseError) -> str:
    return f"error {error_text(error).partition(' ')[0]}"


def test_every_simulated_command_is_compared() -> None:
    assert set(BY_COMMAND) | NOT_COMPARED == set(COMMANDS)
    assert set(COMMANDS) >= WRITES


@pytest.mark.redis
@pytest.mark.timeout(120)
def test_random_commands_have_the_replies_of_a_server(client: redis.Redis) -> None:
    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(calls)
    def compare(drawn: list[tuple[bool, list[bytes]]]) -> None:
        client.unlink(*KEYS)
        both = Both(client)
        for by_script, command in drawn:
            real, simulated = both.say(command, by_script=by_script)
            assert simulated == real, command

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
        "redis.call('SET', 'string', 1700000000123) return redis.call('GET', 'string')",
        "return redis.call('HMGET', 'hash', 'none', 'neither')",
        "return redis.call('HGET', 'hash', 'none') == false",
        "return type(redis.call('SET', 'string', 'x')) == 'table'",
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
    store = Store()
    sha = store.execute([b"SCRIPT", b"LOAD", source])
    client.script_load(source.decode())

    try:
        real: Any = client.execute_command("EVALSHA", sha, 0)
    except redis.ResponseError as error:
        real = _code(error)
    try:
        simulated: Any = store.execute([b"EVALSHA", sha, b"0"])
    except StoreError as error:
        simulated = _code(error_of(error))  # type: ignore[arg-type]
    except ScriptDefectError:
        simulated = "error ERR"

    client.unlink(*KEYS)
    assert simulated == real


def test_unknown_command_raises() -> None:
    store = Store()

    with pytest.raises(NotSimulatedError, match="BITCOUNT"):
        store.execute([b"BITCOUNT", b"a"])
    with pytest.raises(NotSimulatedError, match="KEEPTTL"):
        store.execute([b"SET", b"a", b"1", b"KEEPTTL"])


def test_script_with_an_unknown_command_raises() -> None:
    store = Store()
    sha = store.execute([b"SCRIPT", b"LOAD", b"#!lua\nreturn redis.call('BITCOUNT', 'a')"])

    with pytest.raises(ScriptDefectError, match="BITCOUNT"):
        store.execute([b"EVALSHA", sha, b"0"])


def test_script_without_writes_may_not_write() -> None:
    store = Store()
    source = b"#!lua flags=no-writes\nreturn redis.call('SET', 'a', '1')"
    sha = store.execute([b"SCRIPT", b"LOAD", source])

    with pytest.raises(StoreError, match="Write commands are not allowed"):
        store.execute([b"EVALSHA", sha, b"0"])


def test_full_store_runs_only_scripts_with_allow_oom() -> None:
    store = Store()
    store.is_full = True
    writing = store.execute([b"SCRIPT", b"LOAD", b"#!lua\nreturn 1"])
    allowed = store.execute([b"SCRIPT", b"LOAD", b"#!lua flags=allow-oom\nreturn 1"])

    assert store.execute([b"EVALSHA", allowed, b"0"]) == 1
    with pytest.raises(StoreError, match="OOM"):
        store.execute([b"EVALSHA", writing, b"0"])


def test_key_expires_at_its_time() -> None:
    store = Store()
    store.execute([b"SET", b"a", b"1"])
    store.execute([b"PEXPIRE", b"a", b"1500"])

    store.now_ms = 1499
    assert store.execute([b"PTTL", b"a"]) == 1
    store.now_ms = 1500
    assert store.execute([b"EXISTS", b"a"]) == 0


def test_scan_returns_every_remaining_field_once() -> None:
    store = Store()
    fields = {b"f%d" % n: b"%d" % n for n in range(100)}
    store.execute([b"HSET", HASH, *[word for pair in fields.items() for word in pair]])
    cursor, found = b"0", []
    while True:
        cursor, page = store.execute([b"HSCAN", HASH, cursor, b"COUNT", b"7"])
        found += page[::2]
        store.execute([b"HDEL", HASH, *page[::2]])  # a removed field does not move the others
        if cursor == b"0":
            break

    assert sorted(found) == sorted(fields)
