"""The commands that may be sent to the store over HTTP, as the SDK sends them.

A command is checked before anything of its body is sent: its words, the role of the key, and that
all its keys belong to one run that the key may use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from turnstream.errors import AccessDeniedError, RecordError
from turnstream.store.client import keys as names
from turnstream.store.client.connection import MAX_BLOCK_S
from turnstream.store.client.server_checks import SETTINGS
from turnstream.store.run.credits import CREDIT_FIELDS
from turnstream.store.run.tasks import PROMPT_FIELDS
from turnstream.types.names import RunId, decode_name, encode_run, shown
from turnstream_server.gateway.rest.commands.arguments import number, trajectory
from turnstream_server.gateway.rest.commands.scripts import ANY, BY_SHA, PAYLOAD, key_of
from turnstream_server.keys.records import ApiKey, Role

_PRODUCE: Final[tuple[Role, ...]] = ("produce",)
_TRAIN: Final[tuple[Role, ...]] = ("train",)
_ADMIN: Final[tuple[Role, ...]] = ("admin",)

_INFO_FIELDS: Final = {b"server": (b"run_id",), b"memory": (b"used_memory", b"maxmemory")}
"""Sections of INFO, and what of each is passed on."""

_STREAM_ID: Final = re.compile(rb"[0-9]{1,20}(-[0-9]{1,20})?")
_SCORE: Final = re.compile(rb"\(?[0-9]{1,16}")
_RUN_KEY: Final = re.compile(r"ts:\{([^{}/]+)\}(?:~\d+)?:([a-z]+)")


def _as_it_is(reply: Any) -> Any:
    return reply


class Allowed(NamedTuple):
    """A command that may be sent.

    Attributes:
        words: as it is sent.
        shape: returns the part of its reply that the caller may see.
        block_s: seconds for which its reply may take, for a blocking read; else 0.
    """

    words: Sequence[bytes]
    shape: Callable[[Any], Any] = _as_it_is
    block_s: float = 0.0


def check_command(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Return a command as it may be sent for this key.

    Raises:
        AccessDeniedError: it may not be sent.
        RecordError, BatchingError: an argument is not as the SDK sends it.
    """
    name = words[0].upper()
    check = _COMMANDS.get(name)
    if check is None:
        raise AccessDeniedError(f"the command {shown(words[0])} is not offered over HTTP")
    return check([name, *words[1:]], key)


def _script(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check EVALSHA <sha> <number of keys> <key> .. <argument> .."""
    if len(words) < 3:
        raise RecordError("EVALSHA has no script, or no number of keys")
    allowed = BY_SHA.get(words[1].lower())
    if allowed is None:
        raise AccessDeniedError(
            f"the script {shown(words[1])} is not offered over HTTP, or comes from another release "
            "than the gateway"
        )
    num_keys = number(words[2], most=len(words) - 3)
    place = allowed.place_of([_text(each) for each in words[3 : 3 + num_keys]])
    _require(key, allowed.roles, run=place.run)
    allowed.check(place, words[3 + num_keys :])
    return Allowed(words)


_BY_SOURCE: Final = {each.script.source.encode() for each in BY_SHA.values()}


def _load(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check SCRIPT LOAD <source>."""
    if len(words) != 3 or words[1].upper() != b"LOAD" or words[2] not in _BY_SOURCE:
        raise AccessDeniedError(
            "SCRIPT is offered over HTTP for LOAD of the scripts of this release alone"
        )
    return Allowed(words)


def _plain(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check a command without arguments."""
    _match(words, len(words) == 1)
    return Allowed(words)


def _info(words: Sequence[bytes], key: ApiKey) -> Allowed:
    fields = _INFO_FIELDS.get(words[1].lower()) if len(words) == 2 else None
    if fields is None:
        raise AccessDeniedError(
            "INFO is offered over HTTP for the sections server and memory alone"
        )

    def shape(reply: bytes) -> bytes:
        lines = [line for line in reply.splitlines() if line.partition(b":")[0] in fields]
        return b"\r\n".join([*lines, b""])

    return Allowed(words, shape)


def _config(words: Sequence[bytes], key: ApiKey) -> Allowed:
    expected = [b"GET", *(name.encode() for name in SETTINGS)]
    _match(words, [words[1].upper(), *words[2:]] == expected if len(words) > 1 else False)
    return Allowed(words)


def _get(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check GET <incarnation>."""
    _match(words, len(words) == 2)
    _of_run(words[1], key, ANY, parts=("incarnation",))
    return Allowed(words)


_HASH_FIELDS: Final = {
    "frontier": frozenset(field.encode() for field in CREDIT_FIELDS),
    "prompts": frozenset(field.encode() for field in (*PROMPT_FIELDS, "most_samples")),
}


def _hmget(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check HMGET <key> <field> .."""
    _match(words, len(words) >= 3)
    if _of_payload(words[1], key) == "meta":
        _match(words, set(words[2:]) <= {b"epoch", b"sealed"})
        return Allowed(words)
    part = _of_run(words[1], key, ANY, parts=tuple(_HASH_FIELDS))
    _match(words, set(words[2:]) <= _HASH_FIELDS[part])
    return Allowed(words)


def _hget(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check HGET <config> <revision>."""
    _match(words, len(words) == 3)
    _of_run(words[1], key, ANY, parts=("config",))
    number(words[2])
    return Allowed(words)


def _hgetall(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check HGETALL <config or budget>."""
    _match(words, len(words) == 2)
    _of_run(words[1], key, ANY, parts=("config", "budget"))
    return Allowed(words)


def _zcard(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check ZCARD <again>."""
    _match(words, len(words) == 2)
    _of_run(words[1], key, ANY, parts=("again",))
    return Allowed(words)


def _xrange(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check XRANGE <turns> - +, the payload of a trajectory that is adopted."""
    _match(words, words[2:] == [b"-", b"+"] and _of_payload(words[1], key) == "turns")
    return Allowed(words)


def _xrevrange(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check XREVRANGE <versions> + - COUNT 1."""
    _match(words, [each.upper() for each in words[2:]] == [b"+", b"-", b"COUNT", b"1"])
    _of_run(words[1], key, ANY, parts=("versions",))
    return Allowed(words)


def _xread(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check XREAD [COUNT <number>] BLOCK <ms> STREAMS <wake or versions> <id>, in any order."""
    options: dict[bytes, bytes] = {}
    rest = [*words[1:]]
    while len(rest) > 3:
        options[rest[0].upper()] = rest[1]
        del rest[:2]
    is_known = {*options} in ({b"BLOCK"}, {b"BLOCK", b"COUNT"})
    _match(words, is_known and len(rest) == 3 and rest[0].upper() == b"STREAMS")
    _of_run(rest[1], key, ANY, parts=("wake", "versions"))
    _match(words, _STREAM_ID.fullmatch(rest[2]) is not None)
    most = number(options.get(b"COUNT", b"1"))
    longest_ms = round(MAX_BLOCK_S * 1000)
    block_ms = min(number(options[b"BLOCK"]) or longest_ms, longest_ms)
    sent = [b"XREAD", b"COUNT", b"%d" % most, b"BLOCK", b"%d" % block_ms, *rest]
    return Allowed(sent, block_s=block_ms / 1000)


def _smembers(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check SMEMBERS ts:runs; the reply has the runs that the key may use."""
    _match(words, words[1:] == [names.RUNS.encode()])
    _require(key, ANY)

    def shape(reply: Any) -> Any:
        runs = [RunId(decode_name(each.decode())) for each in reply]
        return [
            each
            for each, run in zip(reply, runs, strict=True)
            if not key.runs or run.name in key.runs
        ]

    return Allowed(words, shape)


def _sadd(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check SADD ts:runs <id>."""
    _match(words, len(words) == 3 and words[1] == names.RUNS.encode())
    _named_run(words[2], key)
    return Allowed(words)


def _xadd(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check XADD ts:news MAXLEN ~ 1000 * n <id>."""
    expected = [names.NEWS.encode(), b"MAXLEN", b"~", b"1000", b"*", b"n"]
    _match(words, len(words) == 8 and words[1:7] == expected)
    _named_run(words[7], key)
    return Allowed(words)


def _zrevrangebyscore(words: Sequence[bytes], key: ApiKey) -> Allowed:
    """Check ZREVRANGEBYSCORE ts:batchers +inf (<ms>, the addresses of batchers."""
    is_known = len(words) == 4 and words[1:3] == [names.BATCHERS.encode(), b"+inf"]
    _match(words, is_known and _SCORE.fullmatch(words[3]) is not None)
    _require(key, _TRAIN)
    return Allowed(words)


_COMMANDS: Final[dict[bytes, Callable[[Sequence[bytes], ApiKey], Allowed]]] = {
    b"EVALSHA": _script,
    b"SCRIPT": _load,
    b"PING": _plain,
    b"TIME": _plain,
    b"INFO": _info,
    b"CONFIG": _config,
    b"GET": _get,
    b"HGET": _hget,
    b"HMGET": _hmget,
    b"HGETALL": _hgetall,
    b"ZCARD": _zcard,
    b"XRANGE": _xrange,
    b"XREVRANGE": _xrevrange,
    b"XREAD": _xread,
    b"SMEMBERS": _smembers,
    b"SADD": _sadd,
    b"XADD": _xadd,
    b"ZREVRANGEBYSCORE": _zrevrangebyscore,
}


def _match(words: Sequence[bytes], is_known: bool) -> None:
    """Refuse a command in another form than the SDK sends."""
    if not is_known:
        raise AccessDeniedError(
            f"{words[0].decode()} is not offered over HTTP with these arguments: "
            f"{shown([*words[1:5]])}"
        )


def _require(key: ApiKey, roles: Sequence[Role], *, run: str | None = None) -> None:
    """Raise AccessDeniedError if the key has none of these roles, or may not use the run."""
    own: list[Role] = [role for role in roles if role in key.roles]
    key.require(own[0] if own else roles[0], run=run)


def _of_run(name: bytes, key: ApiKey, roles: Sequence[Role], *, parts: Sequence[str]) -> str:
    """Return which of these parts of a run a key of the store is; the run must be allowed."""
    text = _text(name)
    found = _RUN_KEY.fullmatch(text)
    if found is not None and found[2] in parts:
        run = names.run_of(text)
        if key_of(run, found[2]) == text:
            _require(key, roles, run=run)
            return found[2]
    raise AccessDeniedError(f"the key {shown(text)} is none of {', '.join(parts)} of a run")


def _of_payload(name: bytes, key: ApiKey) -> str:
    """Return which part of a trajectory's payload a key of the store is; "" for another key."""
    text = _text(name)
    inside, _, part = text.rpartition(":")
    if "/" not in inside or part not in PAYLOAD or not names.is_of_run(text):
        return ""
    run, trajectory_id = names.run_of(text), inside.partition("/")[2].partition("}")[0]
    trajectory(trajectory_id.encode())
    if getattr(names.trajectory_keys(run, trajectory_id), part) != text:
        return ""
    _require(key, _PRODUCE, run=run)
    return part


def _named_run(name: bytes, key: ApiKey) -> None:
    run = RunId(decode_name(_text(name)))
    if encode_run(run).encode() != name:
        raise AccessDeniedError(f"{shown(name)} is no id of a run")
    _require(key, _ADMIN, run=run)


def _text(word: bytes) -> str:
    try:
        return word.decode("ascii")
    except UnicodeDecodeError as error:
        raise AccessDeniedError(f"the key {shown(word)} is none of a run") from error
