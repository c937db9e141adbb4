"""Read recorded trajectories: JSON lines, plain or gzip, in two shapes.

Multi-turn, one trajectory a line; turn t saw `messages[:turns[t]]` and wrote `messages[turns[t]]`::

    {"prompt_uid": "tau/07", "sample": 0, "reward": 1.0, "messages": [...], "turns": [2, 4],
     "policy": ..., "source": ..., "finish": ...}

Samples, one prompt a line::

    {"prompt_uid": "gsm8k/3", "question": "...", "samples": [
        {"sample": 0, "policy": ..., "response": "...", "reward": 0.0}, ...]}

Any other line is an error that names file, line and field: nothing is skipped.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from turnstream.errors import RecordError
from turnstream.types import Status

_STATUS_BY_FINISH = {
    "error": Status.ERROR,
    **dict.fromkeys(("aborted", "abort"), Status.ABORTED),
    **dict.fromkeys(("max_steps", "max_propose_steps", "max_turns"), Status.TRUNCATED),
    **dict.fromkeys(("max_tokens", "length", "truncated"), Status.TRUNCATED),
}
"""Status of a source's word for the end of an episode; every other word is a normal end."""

_Index = Annotated[int, Field(ge=0)]


class _Model(BaseModel):
    """Part of a line; other fields are ignored, and no value is converted."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)


class _Function(_Model):
    name: str
    arguments: Any


class _ToolCall(_Model):
    function: _Function

    def text(self) -> str:
        """Return a call as a model writes it: string arguments unchanged, objects as JSON."""
        name = json.dumps(self.function.name, ensure_ascii=False)
        arguments = self.function.arguments
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


class Message(_Model):
    """One message of a conversation."""

    role: str
    content: str | None = None
    tool_calls: list[_ToolCall] | None = None

    @property
    def text(self) -> str:
        """The content, and then the tool calls."""
        parts = [self.content, *(call.text() for call in self.tool_calls or ())]
        return "\n".join(part for part in parts if part)


class Recording(_Model):
    """One recorded trajectory.

    Attributes:
        turns: ascending indices of the messages of the policy.
        finish: the source's word for its end.
    """

    prompt_uid: str
    sample: _Index
    reward: float
    messages: list[Message]
    turns: list[_Index]
    policy: str | None = None
    source: str | None = None
    finish: str | None = None

    @property
    def status(self) -> Status:
        """The status at the end of the episode."""
        return _STATUS_BY_FINISH.get(self.finish or "", Status.COMPLETED)

    @field_validator("turns")
    @classmethod
    def _check_turns(cls, turns: list[int], info: ValidationInfo) -> list[int]:
        messages = info.data.get("messages", ())
        if turns != sorted(set(turns)) or any(turn >= len(messages) for turn in turns):
            raise ValueError(f"{turns} are not ascending indices of {len(messages)} messages")
        for turn in turns:
            if (role := messages[turn].role) != "assistant":
                raise ValueError(f"message {turn} is of role {role!r}, not assistant")
        return turns


class _Sample(_Model):
    sample: _Index
    response: str
    reward: float
    policy: str | None = None


class _Samples(_Model):
    prompt_uid: str
    question: str
    samples: list[_Sample]
    source: str | None = None

    def recordings(self) -> list[Recording]:
        """Return each sample as a conversation of one turn."""
        question = Message(role="user", content=self.question)
        return [
            Recording(
                prompt_uid=self.prompt_uid,
                sample=each.sample,
                reward=each.reward,
                messages=[question, Message(role="assistant", content=each.response)],
                turns=[1],
                policy=each.policy,
                source=self.source,
            )
            for each in self.samples
        ]


class RecordedGroup(NamedTuple):
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
        RecordedGroup(prompt_uid, tuple(members[sample] for sample in sorted(members)))
        for prompt_uid, members in groups.items()
    ]


def _numbered_recordings(path: Path) -> Iterator[tuple[str, Recording]]:
    for number, line in enumerate(_lines(path), 1):
        if line.isspace():
            continue
        where = f"{path}, line {number}"
        for recording in _recordings_of(_parse_line(line, where=where), where=where):
            yield where, recording


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        try:
            yield from gzip.GzipFile(fileobj=file) if is_gzip else file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise RecordError(f"{path}: damaged gzip file: {error}") from error


def _parse_line(line: bytes, *, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise RecordError(f"{where}: not JSON in UTF-8: {error}") from error
    if not isinstance(value, dict):
        raise RecordError(f"{where}: {_shown(value)} is not an object")
    return value


def _recordings_of(line: dict[str, Any], *, where: str) -> list[Recording]:
    try:
        if line.get("messages") is not None:
            return [Recording.model_validate(line)]
        if line.get("samples") is not None:
            return _Samples.model_validate(line).recordings()
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{_shown(first['input'])} is refused: {first['msg']}"
        if first["type"] == "missing":
            problem = "is missing"
        raise RecordError(f"{where}, field {_path(first['loc'])}: {problem}") from error
    raise RecordError(f"{where}: has neither field messages nor field samples")


def _path(parts: Sequence[int | str]) -> str:
    """Return the place of a field in its line.

    >>> _path(("messages", 0, "role"))
    'messages[0].role'
    """
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"
