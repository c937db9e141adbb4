"""Commands of other programs, as a gateway reads them: any bytes have an answer."""

from __future__ import annotations

from typing import Any

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.connection import DefaultParser
from redis.exceptions import ResponseError

from turnstream.errors import RecordError
from turnstream.generator.outbox.calls import Round
from turnstream.store.client.http_address import http_host_and_port, parse_http, with_key
from turnstream.store.client.replies import error_text
from turnstream.store.client.scripts import pack
from turnstream_server.gateway.rest.commands.packing import pack_replies, read_commands
from turnstream_server.gateway.rest.commands.plan import Refused, plan_commands
from turnstream_server.gateway.rest.commands.scripts import SCRIPTS
from turnstream_server.keys.records import LOCAL_KEY, ApiKey

_replies = st.recursive(
    st.one_of(
        st.none(),
        st.integers(-(2**63), 2**63 - 1),
        st.binary(max_size=40),
        st.sampled_from(["WAIT [5-0] no capacity", "NOPERM no", "OOM full", "ERR x"]).map(
            lambda text: DefaultParser.parse_error(text)
        ),
    ),
    lambda each: st.lists(each, max_size=4),
    max_leaves=10,
)

_words = st.one_of(
    st.binary(max_size=30),
    st.integers(-2, 2**54).map(lambda number: b"%d" % number),
    st.sampled_from([each.script.sha.encode() for each in SCRIPTS]),
    st.sampled_from(
        [
            *(b"EVALSHA", b"MULTI", b"EXEC", b"XREAD", b"BLOCK", b"STREAMS", b"COUNT", b"HMGET"),
            *(b"SCRIPT", b"LOAD", b"INFO", b"GET", b"XRANGE", b"-", b"+", b"SADD", b"ts:runs"),
            *(b"ts:{maze}:config", b"ts:{maze}:wake", b"ts:{maze}:frontier", b"ts:{maze}:ledger"),
            *(b"ts:{maze/g/0/0}:turns", b"ts:{maze/g/0/0}:meta", b"g/0/0", b"1:w", b"refill"),
        ]
    ),
)


def comparable(reply: Any) -> Any:
    """Return a reply whose errors are texts."""
    if isinstance(reply, list):
        return [comparable(each) for each in reply]
    return error_text(reply) if isinstance(reply, ResponseError) else reply


@given(replies=st.lists(_replies, max_size=4))
def test_replies_are_read_as_they_were(replies: list[Any]) -> None:
    reader = hiredis.Reader(replyError=DefaultParser.parse_error)
    reader.feed(pack_replies(replies))

    found = [reader.gets() for _ in replies]

    assert comparable(found) == comparable(replies)
    assert reader.gets() is False


def test_error_reply_is_one_line() -> None:
    assert pack_replies([ResponseError("INVALID a\r\nb\nc")]) == b"-INVALID a b c\r\n"


@given(commands=st.lists(st.lists(st.binary(max_size=20), min_size=1, max_size=5), min_size=1))
def test_commands_are_read_as_they_were(commands: list[list[bytes]]) -> None:
    assert read_commands(pack(commands)) == commands


@given(body=st.binary(max_size=60), cut=st.integers(0, 60))
def test_any_body_is_commands_or_no_record(body: bytes, cut: int) -> None:
    whole = pack([("PING",), ("GET", body)])
    for each in (body, whole[:cut], whole[:cut] + body):
        try:
            found = read_commands(each)
        except RecordError:
            continue
        assert pack(found).startswith(b"*")
        assert sum(map(len, found)) > 0


@given(commands=st.lists(st.lists(_words, min_size=1, max_size=9), min_size=1, max_size=4))
def test_any_commands_are_sent_or_refused(commands: list[list[bytes]]) -> None:
    nobody = ApiKey("", "nobody", frozenset())
    for key in (LOCAL_KEY, nobody):
        try:
            plan = plan_commands(pack(commands), key)
        except RecordError:  # MULTI or EXEC alone
            continue
        replies = list(plan.answers([b"OK"] * len(plan.sent)))
        assert len(replies) == len(commands)
        pack_replies([reply for reply in replies if not isinstance(reply, list)])


def test_first_round_of_a_publisher_is_sent_as_it_is() -> None:
    sent = Round((), loads_scripts=True, pointer="ts:{maze}:incarnation")

    plan = plan_commands(sent.pack(), LOCAL_KEY)

    assert pack(plan.sent) == sent.pack()
    assert len(plan.sent) == sent.num_replies


def test_key_without_a_role_is_denied_everything_of_a_run() -> None:
    (step,) = plan_commands(
        pack([("GET", "ts:{maze}:incarnation")]), ApiKey("", "nobody", frozenset())
    ).steps

    (refused,) = step.commands
    assert isinstance(refused, Refused)
    assert refused.text == "NOPERM key 'nobody' has the roles , needed is read"


@pytest.mark.parametrize(
    ("url", "host_and_port", "base_url"),
    [
        ("http://host", "host:80", "http://host"),
        ("https://host/a/", "host:443", "https://host/a"),
        ("HTTP://[::1]:7601", "::1:7601", "http://[::1]:7601"),
        ("http://:tml-a%2Fb@host:1", "host:1", "http://host:1"),
    ],
)
def test_address_of_a_gateway_has_its_parts(url: str, host_and_port: str, base_url: str) -> None:
    assert http_host_and_port(url) == host_and_port
    assert parse_http(url).base_url == base_url
    assert parse_http(with_key(url, "tml-a/b:c@d")).api_key == "tml-a/b:c@d"
    assert "tml-" not in repr(parse_http(url))
