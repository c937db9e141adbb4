"""The commands of one body: which are sent, and how their replies become the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from redis.exceptions import ResponseError

from turnstream.errors import AccessDeniedError, RecordError, TurnstreamError
from turnstream.store.client.replies import DENIED
from turnstream_server.gateway.rest.commands.checks import Allowed, check_command
from turnstream_server.gateway.rest.commands.packing import read_commands
from turnstream_server.keys.records import ApiKey

_ABORTED: Final = "EXECABORT Transaction discarded because of previous errors."


class Refused(NamedTuple):
    """A command that is not sent.

    Attributes:
        text: its error reply.
    """

    text: str

    @property
    def is_denied(self) -> bool:
        """Whether the key may not send it."""
        return self.text.startswith(f"{DENIED} ")


class _Step(NamedTuple):
    """One command, or the commands of one transaction."""

    commands: Sequence[Allowed | Refused]
    is_transaction: bool = False

    @property
    def sent(self) -> list[Sequence[bytes]]:
        """Return the words that are sent: none of a transaction with a refused command."""
        words = [each.words for each in self.commands if isinstance(each, Allowed)]
        if not self.is_transaction:
            return words
        return [[b"MULTI"], *words, [b"EXEC"]] if len(words) == len(self.commands) else []

    def answers(self, replies: Iterator[Any]) -> Iterator[Any]:
        """Yield the replies for the caller; takes those of the store from `replies`."""
        if not self.is_transaction:
            (command,) = self.commands
            yield _error(command) or _shaped(command, next(replies))
        elif not self.sent:  # as a server answers that refuses a command
            yield b"OK"
            yield from (_error(each) or b"QUEUED" for each in self.commands)
            yield ResponseError(_ABORTED)
        else:
            yield from (next(replies) for _ in range(1 + len(self.commands)))
            results = next(replies)
            if isinstance(results, list):
                results = [_shaped(*each) for each in zip(self.commands, results, strict=True)]
            yield results


class Plan(NamedTuple):
    """The commands of one body, and those of them that are sent.

    Attributes:
        steps: its commands, in order.
        sent: words of the commands that are sent; empty if all are refused.
    """

    steps: Sequence[_Step]
    sent: Sequence[Sequence[bytes]]

    @property
    def block_s(self) -> float:
        """Seconds for which the store may hold the reply; 0 for none."""
        return max(
            (each.block_s for each in self._commands if isinstance(each, Allowed)), default=0.0
        )

    @property
    def denial(self) -> str:
        """Return why the key may send none of the commands; "" if it may send some."""
        found = [each for each in self._commands if isinstance(each, Refused) and each.is_denied]
        if len(found) < len(list(self._commands)):
            return ""
        return found[0].text.removeprefix(f"{DENIED} ")

    def answers(self, replies: Sequence[Any]) -> Iterator[Any]:
        """Yield the replies to all commands; takes those of the sent ones, in order."""
        left = iter(replies)
        for step in self.steps:
            yield from step.answers(left)

    @property
    def _commands(self) -> Iterator[Allowed | Refused]:
        return (command for step in self.steps for command in step.commands)


def plan_commands(body: bytes, key: ApiKey) -> Plan:
    """Return what is sent for a body with this key.

    Raises:
        RecordError: the body is no list of commands, or a transaction in it has no begin or no end.
    """
    commands = read_commands(body)
    steps = list(_steps(commands, key))
    if len(commands) > 1:
        steps = [_without_blocking(step) for step in steps]
    return Plan(steps, [words for step in steps for words in step.sent])


def _steps(commands: Sequence[Sequence[bytes]], key: ApiKey) -> Iterator[_Step]:
    grouped: list[Allowed | Refused] | None = None
    for words in commands:
        name = words[0].upper() if len(words) == 1 else b""
        if name == b"MULTI" and grouped is None:
            grouped = []
        elif name == b"EXEC" and grouped is not None:
            yield _Step(grouped, is_transaction=True)
            grouped = None
        elif name in (b"MULTI", b"EXEC"):
            raise RecordError(f"{name.decode()} stands where it cannot")
        elif grouped is not None:
            grouped.append(_checked(words, key))
        else:
            yield _Step([_checked(words, key)])
    if grouped is not None:
        raise RecordError("MULTI has no EXEC")


def _checked(words: Sequence[bytes], key: ApiKey) -> Allowed | Refused:
    try:
        return check_command(words, key)
    except AccessDeniedError as error:
        return Refused(f"{DENIED} {error}")
    except (TurnstreamError, ValueError) as error:
        return Refused(f"INVALID {error}")


def _without_blocking(step: _Step) -> _Step:
    """Refuse blocking reads: others would wait for the connection."""
    refused = Refused(f"{DENIED} a blocking read has a request of its own")
    commands = [
        refused if isinstance(each, Allowed) and each.block_s else each for each in step.commands
    ]
    return step._replace(commands=commands)


def _error(command: Allowed | Refused) -> ResponseError | None:
    return ResponseError(command.text) if isinstance(command, Refused) else None


def _shaped(command: Allowed | Refused, reply: Any) -> Any:
    """Return the part of a reply that the caller may see; errors as they are."""
    if isinstance(command, Refused) or isinstance(reply, Exception):
        return reply
    return command.shape(reply)
