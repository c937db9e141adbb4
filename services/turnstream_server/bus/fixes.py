"""The files of dead letters: raw records, and turns as JSON that people can mend.

Raw: the records one after the other, each behind its length in four bytes, little-endian; the seal
last. JSON: what `Publisher` would be told::

    {
      "turns": [
        {"prompt_ids": [1, 2], "response_ids": [3], "logprobs": [-0.5], "loss_mask": [1],
         "rewards": [0.0], "version_runs": [[7, 1]], "anchor": "room 3", "extras": {}}
      ],
      "reward": 1.0, "status": "completed",
      "reward_components": {}, "sampling": {}, "tags": {}, "metrics": {}
    }

`prompt_ids` is the whole prompt of the turn. Of a turn, all but `prompt_ids` and `response_ids` may
be left out; of the trajectory, all but `turns`: the rest is then as its seal says. "problem" is a
note, and is not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from turnstream.batching.extras import whole_extras
from turnstream.batching.merge import turn_prompts
from turnstream.errors import CorruptRecordError, InvalidTurnError, RecordError
from turnstream.generator.checks import checked_turn
from turnstream.generator.extras import with_checked_extras
from turnstream.records.damage import TurnFindings
from turnstream.records.events import decode_event
from turnstream.records.turns import decode_turn
from turnstream.types import (
    DeclaredColumn,
    SealedTrajectory,
    Status,
    StoredTurn,
    Trajectory,
    Turn,
    VersionRun,
)
from turnstream_server.bus.letters import LetterContent

_LENGTH_BYTES: Final = 4
_OF_TRAJECTORY: Final = (
    *("reward", "status", "reward_components"),
    *("sampling", "tags", "metrics"),
)
_ARRAYS: Final = ("prompt_ids", "response_ids", "logprobs", "loss_mask", "rewards")
_OF_TURN: Final = (
    *_ARRAYS,
    *("version_runs", "anchor", "extras", "problem"),
)


def raw_bytes(records: Sequence[bytes]) -> bytes:
    """The raw file of these records."""
    return b"".join(len(each).to_bytes(_LENGTH_BYTES, "little") + each for each in records)


def raw_records(data: bytes) -> tuple[bytes, ...]:
    """The records of a raw file.

    Raises:
        CorruptRecordError: its lengths do not add up.
    """
    records: list[bytes] = []
    start = 0
    while start < len(data):
        stop = start + _LENGTH_BYTES + int.from_bytes(data[start : start + _LENGTH_BYTES], "little")
        if stop > len(data):
            raise CorruptRecordError(f"a raw file of {len(data)} bytes names {stop}")
        records.append(data[start + _LENGTH_BYTES : stop])
        start = stop
    return tuple(records)


def to_json(content: LetterContent, declared: Sequence[DeclaredColumn] = ()) -> str:
    """A dead letter as JSON to be mended: what is readable of it, with a note at what is not."""
    readable: list[StoredTurn] = []
    turns: list[dict[str, Any]] = []
    for found in content.turns:
        if found.turn is not None and found.turn.index == len(readable):
            readable.append(found.turn)
            turn = _whole(readable, declared)[-1]
            turns.append(_turn_json(turn))
        else:
            turns.append({"prompt_ids": [], "response_ids": [], **_arrays_json(found)})
        problem = "; ".join(_flaw_text(found))
        if problem:
            turns[-1]["problem"] = problem
    whole: dict[str, Any] = {"turns": turns}
    if content.seal is not None:
        whole |= {name: getattr(content.seal, name) for name in _OF_TRAJECTORY}
    if content.seal_problem:
        whole["problem"] = f"its seal cannot be read: {content.seal_problem}"
    return json.dumps(whole, indent=1)


def read_fix(
    path: Path, *, sample: int, seal: SealedTrajectory | None, declared: Sequence[DeclaredColumn]
) -> Trajectory:
    """The trajectory of a file, JSON or raw, checked as whatever a generator sends.

    Args:
        path: of the file.
        sample: of the trajectory.
        seal: says what the file leaves out; None where it cannot be read.
        declared: extra columns of the run.

    Raises:
        InvalidTurnError: names the turn, the field and the value that cannot be.
        RecordError: a raw record cannot be read.
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    if data.lstrip()[:1] == b"{":
        return _from_json(data, sample=sample, seal=seal, declared=declared)
    return from_records(raw_records(data), sample=sample, seal=seal, declared=declared)


def from_records(
    records: Sequence[bytes],
    *,
    sample: int,
    seal: SealedTrajectory | None,
    declared: Sequence[DeclaredColumn],
) -> Trajectory:
    """The trajectory of records, the seal last or left out, checked in the same way.

    Raises:
        InvalidTurnError: names the turn, the field and the value that cannot be.
        RecordError: a record cannot be read.
    """
    seal = _seal_of(records) or seal
    turns = records[:-1] if records and records[-1][2:3] == b"E" else records
    stored = [decode_turn(record) for record in turns]
    for index, turn in enumerate(stored):
        if turn.index != index:
            raise CorruptRecordError(f"turn {turn.index} is in the place of turn {index}")
        _check_share(turn, stored)
    given = [{**_turn_fields(turn), "extras": turn.extras} for turn in _whole(stored, declared)]
    return _trajectory(given, {}, sample=sample, seal=seal, declared=declared)


def _check_share(turn: StoredTurn, stored: Sequence[StoredTurn]) -> None:
    num_shareable = stored[turn.parent_turn].shape.num_tokens if turn.parent_turn >= 0 else 0
    if turn.shared_tokens > num_shareable:
        raise CorruptRecordError(
            f"turn {turn.index} shares {turn.shared_tokens} tokens of {num_shareable}"
        )


def _from_json(
    data: bytes,
    *,
    sample: int,
    seal: SealedTrajectory | None,
    declared: Sequence[DeclaredColumn],
) -> Trajectory:
    try:
        whole = json.loads(data)
    except ValueError as error:
        raise InvalidTurnError("file", f"is no JSON: {error}") from error
    turns = whole.pop("turns", None)
    if not isinstance(turns, list) or not all(isinstance(each, dict) for each in turns):
        raise InvalidTurnError("turns", "is no list of turns")
    return _trajectory(turns, whole, sample=sample, seal=seal, declared=declared)


def _trajectory(
    turns: Sequence[Mapping[str, Any]],
    said: Mapping[str, Any],
    *,
    sample: int,
    seal: SealedTrajectory | None,
    declared: Sequence[DeclaredColumn],
) -> Trajectory:
    strange = said.keys() - {*_OF_TRAJECTORY, "problem"}
    if strange:
        raise InvalidTurnError("file", f"says {sorted(strange)}, which is unknown")
    facts: dict[str, Any] = {"status": Status.COMPLETED, "reward": None}
    if seal is not None:
        facts = {name: getattr(seal, name) for name in _OF_TRAJECTORY}
        facts["awaits_reward"] = seal.awaits_reward and "reward" not in said
    facts |= {name: value for name, value in said.items() if name != "problem"}
    checked: list[Turn] = []
    for index, fields in enumerate(turns):
        try:
            checked.append(_checked(fields, declared))
        except InvalidTurnError as error:
            field = f"turns[{index}].{error.field}"
            raise InvalidTurnError(field, error.message) from error
    return Trajectory(turns=tuple(checked), sample=sample, **facts)


def _checked(fields: Mapping[str, Any], declared: Sequence[DeclaredColumn]) -> Turn:
    strange = fields.keys() - {*_OF_TURN}
    if strange:
        raise InvalidTurnError(min(strange), "is unknown")
    given = {name: value for name, value in fields.items() if name not in ("extras", "problem")}
    prompt_ids, response_ids = given.pop("prompt_ids", ()), given.pop("response_ids", ())
    try:
        runs = [VersionRun(*run) for run in given.pop("version_runs", None) or ()]
    except TypeError as error:
        raise InvalidTurnError(
            "version_runs", f"is no list of [version, count]: {error}"
        ) from error
    turn = checked_turn(prompt_ids, response_ids, version_runs=runs, allow_empty=True, **given)
    return with_checked_extras(turn, fields.get("extras"), declared)


def _seal_of(records: Sequence[bytes]) -> SealedTrajectory | None:
    try:
        event = decode_event(records[-1]) if records else None
    except RecordError:
        return None
    return event if isinstance(event, SealedTrajectory) else None


def _whole(stored: Sequence[StoredTurn], declared: Sequence[DeclaredColumn]) -> list[Turn]:
    """The turns with their whole prompts."""
    return [
        Turn(
            prompt_ids=prompt_ids,
            response_ids=turn.response_ids,
            logprobs=turn.logprobs,
            loss_mask=turn.loss_mask,
            rewards=turn.rewards,
            version_runs=turn.version_runs,
            extras=extras,
            anchor=turn.anchor,
        )
        for turn, prompt_ids, extras in zip(
            stored, turn_prompts(stored), whole_extras(stored, declared), strict=True
        )
    ]


def _turn_fields(turn: Turn) -> dict[str, Any]:
    return {
        name: value for name in (*_ARRAYS, "anchor") if (value := getattr(turn, name)) is not None
    } | {"version_runs": turn.version_runs}


def _turn_json(turn: Turn) -> dict[str, Any]:
    fields = {
        name: value.tolist() if name in _ARRAYS else value
        for name, value in _turn_fields(turn).items()
    }
    extras = {name: values.tolist() for name, values in turn.extras.items()}
    return {**fields, "extras": extras} if extras else fields


def _arrays_json(found: TurnFindings) -> dict[str, Any]:
    """What lies in a turn that cannot be read as a whole: its new tokens, without the prompt."""
    arrays = {name: values.tolist() for name, values in found.arrays.items()}
    tokens = arrays.pop("token_ids", [])
    response = max(len(arrays.get(name, ())) for name in ("logprobs", "rewards", "loss_mask"))
    response = min(response, len(tokens))
    split = len(tokens) - response
    own = {name: values for name, values in arrays.items() if not name.startswith("extra.")}
    return {"prompt_ids": tokens[:split], "response_ids": tokens[split:], **own}


def _flaw_text(found: TurnFindings) -> list[str]:
    lines = [
        f"bytes {flaw.start} to {flaw.stop}, {flaw.field}: {flaw.problem}" for flaw in found.flaws
    ]
    if found.turn is None:
        lines.append("what is readable is here; the beginning of the prompt may lack")
    elif found.is_repaired:
        lines.append("put right here")
    return lines
