from __future__ import annotations

import hiredis
import pytest
from redis import exceptions as redis_errors
from redis.connection import Connection, DefaultParser

from testkit.runs.scripts import script
from turnstream import errors
from turnstream.store.client import replies
from turnstream.store.client.scripts import pack


def error_reply(text: str) -> Exception:
    """The error that the Redis client makes of a server's error reply."""
    reader = hiredis.Reader(replyError=DefaultParser.parse_error)
    reader.feed(f"-{text}\r\n".encode())
    error = reader.gets()
    assert isinstance(error, Exception)
    return error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FENCED epoch 2 writes", errors.FencedError("epoch 2 writes")),
        ("CONFLICT turn 3", errors.ConflictError("turn 3")),
        ("GAP [4] expected 4", errors.TurnGapError("expected 4")),
        ("NORUN no such run", errors.RunNotFoundError("no such run")),
        ("BEHIND step 7", errors.StoreBehindError("step 7")),
        ("CLOSED the end", errors.EndOfRunError("the end")),
        ("TOOLARGE group g needs 9", errors.GroupTooLargeError("group g needs 9")),
        ("HELD [1500] g/0/0 is w's", errors.ConflictError("g/0/0 is w's", 1.5)),
        ("WAIT [5-0] no capacity", errors.RejectedError("no capacity", replies.RETRY_AFTER_S)),
    ],
)
def test_every_refusal_of_a_script_has_its_error(
    text: str, expected: errors.TurnstreamError
) -> None:
    found = replies.translate(error_reply(text))

    assert type(found) is type(expected)
    assert found.args == expected.args


@pytest.mark.parametrize(
    ("kind", "errors_found"),
    [
        (
            errors.StoreUnavailableError,
            [
                error_reply("LOADING Redis is loading the dataset in memory"),
                error_reply("READONLY You can't write against a read only replica."),
                error_reply("MISCONF Errors writing to the AOF file: No space left on device"),
                error_reply("BUSY Redis is busy running a script."),
                error_reply("MASTERDOWN Link with MASTER is down"),
                error_reply("CLUSTERDOWN The cluster is down"),
                error_reply("TRYAGAIN Multiple keys request during rehashing of slot"),
                error_reply("NOREPLICAS Not enough good replicas to write."),
                # A server that restarted between the loading of a script and its call.
                error_reply("NOSCRIPT No matching script. Please use EVAL."),
                redis_errors.ConnectionError("refused"),
                redis_errors.TimeoutError("slow"),
                OSError(111, "refused"),
                TimeoutError("slow"),
            ],
        ),
        (
            errors.StoreFullError,
            [error_reply("OOM command not allowed when used memory > 'maxmemory'.")],
        ),
    ],
)
def test_temporary_error_is_unavailable_or_full_with_a_time_to_retry(
    kind: type[errors.StoreUnavailableError], errors_found: list[Exception]
) -> None:
    for each in errors_found:
        error = replies.translate(each)
        assert type(error) is kind
        assert error.retry_after_s == replies.RETRY_AFTER_S


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("NOAUTH Authentication required.", errors.AccessDeniedError),
        ("WRONGPASS invalid username-password pair", errors.AccessDeniedError),
        ("NOPERM this user may not run the 'evalsha' command", errors.AccessDeniedError),
        ("ERR unknown command 'EVALSHA'", errors.RejectedError),
        ("WRONGTYPE Operation against a key of the wrong kind", errors.RejectedError),
    ],
)
def test_permanent_refusal_is_rejected_with_the_reason(
    text: str, kind: type[errors.TurnstreamError]
) -> None:
    error = replies.translate(error_reply(text))

    assert type(error) is kind
    assert text.split(" ", 1)[1] in str(error)


def test_denied_call_has_one_error_with_and_without_the_client() -> None:
    """A publisher reads error replies itself; other calls read the errors of the client."""
    text = "NOPERM key 'ci' has the roles read, needed is produce"

    of_client = replies.translate(error_reply(text))
    reply = error_reply(text)
    assert isinstance(reply, redis_errors.ResponseError)
    of_reply = replies.parse_refusal(replies.error_text(reply)).error

    assert type(of_client) is type(of_reply) is errors.AccessDeniedError
    assert of_client.args == of_reply.args


@pytest.mark.parametrize(
    "text", ["OOM full", "READONLY no", "NOSCRIPT what", "FENCED gone", "NOPERM no"]
)
def test_the_code_of_an_error_is_found_again(text: str) -> None:
    error = error_reply(text)

    assert isinstance(error, redis_errors.ResponseError)
    assert replies.error_text(error) == text


def test_turnstream_error_is_not_translated() -> None:
    error = errors.FencedError("over")

    assert replies.translate(replies.RefusedRequestError(error)) is error
    with pytest.raises(errors.FencedError) as raised, replies.translating():
        raise error
    assert raised.value is error
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("CONFLICT [group] group a%2Fb%231 is already over", "group a/b#1 is already over"),
        ("CONFLICT a%2Fb/0/0 is being written by gpu%3A7", "a/b/0/0 is being written by gpu:7"),
        (
            "FENCED a%2Fb/0/0 is open for 2:gpu%3A7, not for 1",
            "a/b/0/0 is open for 2:gpu:7, not for 1",
        ),
        ("FENCED epoch 2 is that of a%2F1, not of a%2F2", "epoch 2 is that of a/1, not of a/2"),
        ("EXPIRED observer a%2F1 was never declared", "observer a/1 was never declared"),
        ("WAIT [1-0] the run is paused: at 50%25", "the run is paused: at 50%25"),
        ("CONFLICT group a%252Fb is over", "group a%2Fb is over"),
    ],
)
def test_refusal_has_decoded_names(text: str, message: str) -> None:
    assert str(replies.translate(error_reply(text))) == message


def test_commands_are_packed_as_the_client_packs_them() -> None:
    payload = bytes(range(256)) * 40
    calls = [
        script("append")(["ts:{r/ä}:turns"], 1, "2", payload, memoryview(payload), b"").words,
        ("SCRIPT", "LOAD", "return 'ö'"),
    ]

    packed = pack(calls)

    assert packed == b"".join(b"".join(Connection().pack_command(*words)) for words in calls)
