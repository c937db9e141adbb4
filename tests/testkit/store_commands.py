"""Commands as a gateway gets them, and its refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hiredis
import httpx2
import redis
from redis.connection import DefaultParser

from turnstream.store.client.replies import error_text
from turnstream.store.client.scripts import Command, pack
from turnstream_server.gateway.rest.commands.packing import read_commands
from turnstream_server.gateway.rest.commands.plan import Refused, plan_commands
from turnstream_server.gateway.rest.commands.scripts import SCRIPTS
from turnstream_server.keys.records import LOCAL_KEY, ApiKey, Role

SESSION_RUN = "maze of refusals"
"""Run of the session whose commands are varied."""


def name_of(words: Sequence[bytes]) -> str:
    """Return the script of a command, or the command and the part of a run that it reads."""
    command = words[0].decode()
    if command == "EVALSHA":
        return next(each.script.name for each in SCRIPTS if each.script.sha.encode() == words[1])
    if command in ("CONFIG", "INFO", "SCRIPT"):
        return f"{command} {words[1].decode()}"
    named = next((word for word in words if word.startswith(b"ts:")), b"")
    part = named.rpartition(b":")[2].decode()
    return f"{command} {part}".strip()


def key_with(*roles: Role, runs: Sequence[str] = ()) -> ApiKey:
    """Return a key of these roles, bound to these runs."""
    return ApiKey("id", "test", frozenset(roles), runs=tuple(runs))


def refusal(words: Sequence[bytes], key: ApiKey = LOCAL_KEY) -> str:
    """Return the error reply to a command of this key; "" if it is sent."""
    (step,) = plan_commands(pack([words]), key).steps
    (command,) = step.commands
    return command.text if isinstance(command, Refused) else ""


def words_of(call: Command) -> list[bytes]:
    """Return the words of a call as they travel."""
    (words,) = read_commands(pack([call.words]))
    return words


def replies_of(answer: httpx2.Response) -> list[Any]:
    """Return the replies of an answer; errors as texts."""
    assert answer.status_code == 200, answer.text
    reader = hiredis.Reader(replyError=DefaultParser.parse_error)
    reader.feed(answer.content)
    found: list[Any] = []
    while (reply := reader.gets()) is not False:
        found.append(error_text(reply) if isinstance(reply, redis.ResponseError) else reply)
    return found
