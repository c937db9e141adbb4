"""The dead letters of a run, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import redis
from rich.console import Console
from rich.table import Table

from turnstream.errors import InvalidConfigError
from turnstream.records.damage import TurnFindings
from turnstream.store import keys
from turnstream.store.configs import read_config
from turnstream.store.connection import connect
from turnstream.store.run_ids import find_run
from turnstream.types import Trajectory
from turnstream_server.bus.fixes import raw_bytes, read_fix, to_json
from turnstream_server.bus.letters import (
    DamagedEvent,
    DeadLetter,
    LetterContent,
    discard_event,
    discard_letter,
    find_letter,
    open_event,
    open_letter,
    read_letters,
)
from turnstream_server.bus.replays import Replayed, check_episode, replay_letters

_YEAR_10000_MS: Final = 253_402_300_800_000


def print_letters(url: str, run: str, console: Console) -> None:
    """Every dead letter: why, since when, how large, and what became of its group.

    Raises:
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
    with connect(url) as client:
        run = find_run(client, run)
        found = read_letters(client, run)
    table = Table(
        *("dead letter", "since", "bytes", "its group", "replayed as", "reason"),
        title=f"dead letters of {run}",
    )
    for letter in found.letters:
        table.add_row(
            keys.readable_name(letter.trajectory_id),
            _time(letter.since_ms),
            f"{letter.num_bytes:,}",
            letter.group_state,
            keys.readable_name(letter.replayed_as),
            letter.reason,
        )
    for event in found.events:
        size = f"{len(event.record):,}"
        table.add_row(f"event {event.event_id}", _time(event.since_ms), size, "", "", event.reason)
    console.print(table)
    console.print(
        f"{found.num_bytes:,} of {found.max_bytes:,} bytes kept; discarded: "
        f"{found.num_discarded:,} trajectories, {found.num_discarded_events:,} events"
    )


def letters_json(url: str, run: str) -> str:
    """The same as JSON.

    Raises:
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
    with connect(url) as client:
        run = find_run(client, run)
        found = read_letters(client, run)
    content: dict[str, Any] = {
        "run": run,
        "letters": [_letter_facts(letter) for letter in found.letters],
        "events": [_event_facts(event) for event in found.events],
        "num_discarded": found.num_discarded,
        "num_discarded_events": found.num_discarded_events,
        "num_bytes": found.num_bytes,
        "max_bytes": found.max_bytes,
    }
    return json.dumps(content, indent=2)


def print_letter(url: str, run: str, name: str, console: Console) -> None:
    """One dead letter: each of its records, what is readable of it, and where it is wrong.

    Raises:
        LetterNotFoundError: none of that name is kept.
        StoreUnavailableError: the store cannot be reached.
    """
    with connect(url) as client:
        run = find_run(client, run)
        if is_event(name):
            lines = _event_lines(open_event(client, run, name))
        else:
            content = open_letter(client, run, find_letter(client, run, name))
            name = keys.readable_name(content.letter.trajectory_id)
            lines = letter_lines(content)
    table = Table(title=f"{run}: {name}", show_header=False)
    for what, text in lines:
        table.add_row(what, text)
    console.print(table)


def letter_json(url: str, run: str, name: str) -> str:
    """The same as JSON.

    Raises:
        LetterNotFoundError: none of that name is kept.
        StoreUnavailableError: the store cannot be reached.
    """
    with connect(url) as client:
        run = find_run(client, run)
        if is_event(name):
            return json.dumps(_event_facts(open_event(client, run, name)), indent=2)
        content = open_letter(client, run, find_letter(client, run, name))
    facts = _letter_facts(content.letter) | {
        "seal_problem": content.seal_problem,
        "missing_turns": [*content.missing],
        "turns": [_turn_facts(found) for found in content.turns],
    }
    return json.dumps(facts, indent=2)


def write_letter(url: str, run: str, name: str, path: Path) -> None:
    """Write a dead letter into a file: JSON to be mended where it ends in .json, else the bytes.

    Raises:
        LetterNotFoundError: none of that name is kept.
        StoreUnavailableError: the store cannot be reached.
        OSError: the file cannot be written.
    """
    with connect(url) as client:
        run = find_run(client, run)
        if is_event(name):
            path.write_bytes(open_event(client, run, name).record)
            return
        content = open_letter(client, run, find_letter(client, run, name))
        _, config = read_config(client, run)
    if path.suffix == ".json":
        path.write_text(to_json(content, config.extra_columns), encoding="utf-8")
    else:
        path.write_bytes(raw_bytes(content.records))


def check_fix(url: str, run: str, names: Sequence[str], fixes: Sequence[Path]) -> None:
    """Make sure that the door would take these files; nothing is written.

    Raises:
        LetterNotFoundError: none of that name is kept.
        InvalidTurnError: a file says what cannot be.
        RecordError: a raw record cannot be read.
    """
    with connect(url) as client:
        run = find_run(client, run)
        _, config = read_config(client, run)
        for name, fixed in _fixed(client, run, names, fixes).items():
            assert fixed is not None
            check_episode(fixed, declared=config.extra_columns, name=name)


def replay(
    url: str, run: str, names: Sequence[str], fixes: Sequence[Path], *, as_group: str | None
) -> tuple[Replayed, ...]:
    """Replay dead letters, each by the fix in its place where there are fixes.

    Raises:
        TurnstreamError: as `replay_letters` and `read_fix` say.
    """
    with connect(url) as client:
        run = find_run(client, run)
        if fixes:
            letters = _fixed(client, run, names, fixes)
        else:
            letters = dict.fromkeys(find_letter(client, run, name) for name in names)
    return replay_letters(url, run, letters, as_group=as_group)


def outcome(done: Replayed) -> str:
    """What became of a letter, in a line."""
    letter, became = map(keys.readable_name, (done.letter_id, done.trajectory_id))
    return f"{letter} -> {became}, {done.state}" + (f": {done.reason}" if done.reason else "")


def discard(url: str, run: str, names: Sequence[str]) -> int:
    """End dead letters for good; how many of them were ended now.

    Raises:
        ConflictError: one of them is not dead.
        StoreUnavailableError: the store cannot be reached.
    """
    with connect(url) as client:
        run = find_run(client, run)
        return sum(
            discard_event(client, run, name)
            if is_event(name)
            else discard_letter(client, run, find_letter(client, run, name))
            for name in names
        )


def is_event(name: str) -> bool:
    """Whether a name is the id of an event, and not of a trajectory.

    >>> is_event("1700000000123-0"), is_event("g/1/0")
    (True, False)
    """
    return "/" not in name


def letter_lines(content: LetterContent) -> list[tuple[str, str]]:
    """What there is to say of a letter, in order: (what, details)."""
    letter, seal = content.letter, content.seal
    lines = [
        ("reason", letter.reason),
        ("since", _time(letter.since_ms)),
        ("its group", letter.group_state),
    ]
    if letter.replayed_as:
        lines.append(("replayed as", keys.readable_name(letter.replayed_as)))
    for found in content.turns:
        lines.append((f"turn {found.index}", _turn_text(found)))
        lines += [
            ("", f"bytes {flaw.start} to {flaw.stop}, {flaw.field}: {flaw.problem}")
            for flaw in found.flaws
        ]
    lines += [(f"turn {index}", "is not stored") for index in content.missing]
    if seal is None:
        lines.append(("seal", f"cannot be read: {content.seal_problem}"))
    else:
        reward = "none" if seal.reward is None else f"{seal.reward:g}"
        lines.append(("seal", f"{len(seal.turns)} turns, {seal.status}, reward {reward}"))
    return lines


def _turn_text(found: TurnFindings) -> str:
    crcs = ", ".join(
        f"{name} {crc:08x}"
        for name, crc in (
            ("checksum found", found.found_crc),
            ("stored", found.stored_crc),
            ("sealed", found.sealed_crc),
        )
        if crc is not None
    )
    readable = ", ".join(f"{name} {len(values)}" for name, values in found.arrays.items())
    if found.is_repaired:
        what = "readable, its wrong byte is known"
    else:
        what = "readable" if found.turn is not None else "not readable as a turn"
    return f"{len(found.record):,} bytes, {what}; {crcs}; arrays: {readable or 'none'}"


def _event_lines(event: DamagedEvent) -> list[tuple[str, str]]:
    return [
        ("reason", event.reason),
        ("since", _time(event.since_ms)),
        ("bytes", f"{len(event.record):,}"),
        ("hex", event.record[:64].hex(" ")),
    ]


def _fixed(
    client: redis.Redis, run: str, names: Sequence[str], fixes: Sequence[Path]
) -> dict[str, Trajectory | None]:
    if len(fixes) != len(names):
        raise InvalidConfigError("--fix", f"{len(fixes)} files for {len(names)} dead letters")
    _, config = read_config(client, run)
    ids = [find_letter(client, run, name) for name in names]
    return {
        letter_id: read_fix(
            path,
            sample=keys.parse_trajectory_id(letter_id).sample,
            seal=open_letter(client, run, letter_id).seal,
            declared=config.extra_columns,
        )
        for letter_id, path in zip(ids, fixes, strict=True)
    }


def _letter_facts(letter: DeadLetter) -> dict[str, Any]:
    return {name: getattr(letter, name) for name in DeadLetter.__slots__}


def _event_facts(event: DamagedEvent) -> dict[str, Any]:
    return {
        "event_id": event.event_id,
        "reason": event.reason,
        "since_ms": event.since_ms,
        "num_bytes": len(event.record),
        "record": event.record.hex(),
    }


def _turn_facts(found: TurnFindings) -> dict[str, Any]:
    return {
        "index": found.index,
        "num_bytes": len(found.record),
        "stored_crc": found.stored_crc,
        "found_crc": found.found_crc,
        "sealed_crc": found.sealed_crc,
        "is_readable": found.turn is not None,
        "is_repaired": found.is_repaired,
        "arrays": {name: [*values.shape] for name, values in found.arrays.items()},
        "flaws": [flaw._asdict() for flaw in found.flaws],
    }


def _time(ms: int) -> str:
    """Return a time as text; as a number where no calendar has it, as of a damaged event."""
    if ms >= _YEAR_10000_MS:
        return f"{ms} ms"
    return datetime.fromtimestamp(ms / 1_000, UTC).isoformat(sep=" ", timespec="seconds")
