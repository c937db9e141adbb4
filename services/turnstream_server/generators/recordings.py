"""Read recorded trajectories: JSON lines, plain or gzip, in two shapes.

Multi-turn, one trajectory a line; turn t saw `messages[:turns[t]]` and wrote `messages[turns[t]]`::

    {"prompt_uid": "tau/07", "sample": 0, "reward": 1.0, "messages": [...], "turns": [2, 4],
     "policy": ..., "source": ..., "finish": ..., "times": [one a message, in seconds]}

Samples, one prompt a line::

    {"prompt_uid": "gsm8k/3", "question": "...", "samples": [
        {"sample": 0, "policy": ..., "response": "...", "reward": 0.0}, ...]}

Any other line is an error that names file, line and field: nothing is skipped.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from turnstream.errors import RecordError
from turnstream.types import Status

_STATUS_BY_FINISH = {
    "error": Status.ERROR,
    "aborted": Status.ABORTED,
    "abort": Status.ABORTED,
    "max_steps": Status.TRUNCATED,
    "max_propose_steps": Status.TRUNCATED,
    "max_turns": Status.TRUNCATED,
    "max_tokens": Status.TRUNCATED,
    "length": Status.TRUNCATED,
    "truncated": Status.TRUNCATED,
}
"""Status of a source's word for the end of an episode; every other word is a normal end."""


class Message(NamedTuple):
    """One message of a conversation, with its tool calls."""

    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recorded trajectory.

    Attributes:
        turns: ascending indices of the messages of the policy.
        times: seconds, one per message, on the clock of its source; empty without a clock.
        finish: the source's word for its end.
    """

    prompt_uid: str
    sample: int
    reward: float
    messages: tuple[Message, ...]
    turns: tuple[int, ...]
    policy: str = ""
    source: str = ""
    finish: str = ""
    times: tuple[float, ...] = ()

    @property
    def status(self) -> Status:
        """The status at the end of the episode."""
        return _STATUS_BY_FINISH.get(self.finish, Status.COMPLETED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """The recordings of one prompt, by ascending sample."""

    prompt_uid: str
    recordings: tuple[Recording, ...]


def read_groups(path: Path) -> list[RecordedGroup]:
    """Return all groups of a file, in order of first appearance.

    Raises:
        RecordError: the file is no such recording, or two recordings share prompt and sample.
        OSError: the file cannot be read.
    """
    groups: dict[str, dict[int, Recording]] = {}
    for where, recording in _numbered_recordings(path):
        members = groups.setdefault(recording.prompt_uid, {})
        if recording.sample in members:
            raise RecordError(
                f"{where}, field sample: prompt {recording.prompt_uid!r} "
                f"has sample {recording.sample} twice"
            )
        members[recording.sample] = recording
    return [
        RecordedGroup(
            prompt_uid=prompt_uid,
            recordings=tuple(members[sample] for sample in sorted(members)),
        )
        for prompt_uid, members in groups.items()
    ]


def read_recordings(path: Path) -> Iterator[Recording]:
    """Yield every trajectory of a file, in its order; errors as of `read_groups`."""
    for _, recording in _numbered_recordings(path):
        yield recording


def _numbered_recordings(path: Path) -> Iterator[tuple[str, Recording]]:
    for number, line in enumerate(_lines(path), 1):
        if line.isspace():
            continue
        fields = _parse_line(line, where=f"{path}, line {number}")
        for recording in _recordings_of(fields):
            yield fields.where, recording


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        try:
            yield from gzip.GzipFile(fileobj=file) if is_gzip else file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise RecordError(f"{path}: damaged gzip file: {error}") from error


def _parse_line(line: bytes, *, where: str) -> _Fields:
    try:
        value = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise RecordError(f"{where}: not JSON in UTF-8: {error}") from error
    return _Fields(value, where=where, name="")


def _recordings_of(line: _Fields) -> Iterable[Recording]:
    if line.has("messages"):
        return [_multi_turn(line)]
    if line.has("samples"):
        return _samples(line)
    raise RecordError(f"{line.where}: has neither field messages nor field samples")


def _multi_turn(line: _Fields) -> Recording:
    messages = tuple(_message(fields) for fields in line.objects("messages"))
    turns = tuple(line.integers("turns"))
    if list(turns) != sorted(set(turns)) or any(turn >= len(messages) for turn in turns):
        line.fail("turns", f"{list(turns)} are not ascending indices of {len(messages)} messages")
    for turn in turns:
        if messages[turn].role != "assistant":
            line.fail("turns", f"message {turn} is of role {messages[turn].role!r}, not assistant")
    times = tuple(line.numbers("times")) if line.has("times") else ()
    if times and len(times) != len(messages):
        line.fail("times", f"{len(times)} values for {len(messages)} messages")
    return Recording(
        prompt_uid=line.text("prompt_uid"),
        sample=line.integer("sample"),
        reward=line.number("reward"),
        messages=messages,
        turns=turns,
        policy=line.text_or_empty("policy"),
        source=line.text_or_empty("source"),
        finish=line.text_or_empty("finish"),
        times=times,
    )


def _samples(line: _Fields) -> Iterator[Recording]:
    question = Message("user", line.text("question"))
    shared = Recording(
        prompt_uid=line.text("prompt_uid"), sample=0, reward=0.0, messages=(), turns=(1,)
    )
    for fields in line.objects("samples"):
        yield replace(
            shared,
            sample=fields.integer("sample"),
            reward=fields.number("reward"),
            messages=(question, Message("assistant", fields.text("response"))),
            policy=fields.text_or_empty("policy"),
            source=line.text_or_empty("source"),
        )


def _message(fields: _Fields) -> Message:
    parts = [fields.text_or_empty("content")]
    if fields.has("tool_calls"):
        parts += [_tool_call(call.object("function")) for call in fields.objects("tool_calls")]
    return Message(fields.text("role"), "\n".join(part for part in parts if part))


def _tool_call(function: _Fields) -> str:
    """Return a call as a model writes it: string arguments unchanged, objects as JSON."""
    name = json.dumps(function.text("name"), ensure_ascii=False)
    arguments = function.value("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


class _Fields:
    """A JSON object of a line; errors of its fields name file, line and field."""

    def __init__(self, value: object, *, where: str, name: str) -> None:
        if not isinstance(value, dict):
            field = f", field {name}" if name else ""
            raise RecordError(f"{where}{field}: {_shown(value)} is not an object")
        self.where = where
        self._name = name
        self._values: dict[str, object] = value

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._values.get(name) is not None

    def fail(self, name: str, message: str) -> NoReturn:
        """Raise the error that names this field."""
        raise RecordError(f"{self.where}, field {self._path(name)}: {message}")

    def value(self, name: str) -> object:
        """Return the value of the field, null included."""
        if name not in self._values:
            self.fail(name, "is missing")
        return self._values[name]

    def text(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str):
            self._wrong(name, value, "text")
        return value

    def text_or_empty(self, name: str) -> str:
        return self.text(name) if self.has(name) else ""

    def integer(self, name: str) -> int:
        return self._integer(name, self.value(name))

    def number(self, name: str) -> float:
        return self._number(name, self.value(name))

    def integers(self, name: str) -> list[int]:
        return [self._integer(f"{name}[{i}]", value) for i, value in enumerate(self._list(name))]

    def numbers(self, name: str) -> list[float]:
        return [self._number(f"{name}[{i}]", value) for i, value in enumerate(self._list(name))]

    def object(self, name: str) -> _Fields:
        return _Fields(self.value(name), where=self.where, name=self._path(name))

    def objects(self, name: str) -> list[_Fields]:
        return [
            _Fields(value, where=self.where, name=f"{self._path(name)}[{i}]")
            for i, value in enumerate(self._list(name))
        ]

    def _list(self, name: str) -> list[object]:
        value = self.value(name)
        if not isinstance(value, list):
            self._wrong(name, value, "a list")
        return value

    def _integer(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self._wrong(name, value, "a whole number from 0")
        return value

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(name, value, "a finite number")
        if not math.isfinite(value):
            self._wrong(name, value, "a finite number")
        return float(value)

    def _wrong(self, name: str, value: object, wanted: str) -> NoReturn:
        self.fail(name, f"{_shown(value)} is not {wanted}")

    def _path(self, name: str) -> str:
        return f"{self._name}.{name}" if self._name else name


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"
