"""The losses of a store under everysec after a power cut, and the contradictions that they excuse.

The checker reads the data before any process can resend. The logs then contain two histories::

    steps 1 ... 7 are planned | cut: 5 of them are left | steps 6 and 7 are planned again

A publisher that survives has to resend every loss. A loss remains only if its generator died.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import redis

from harness.history import FORGOTTEN_S, Line
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import newest_version
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.bus.queries.trajectory_history import TrajectoryNotFoundError, history_of
from turnstream_server.embedded import EmbeddedServer

SENT_AGAIN_S = 15.0
"""A publisher that lives for so long behind a cut has sent all again: it keeps five seconds, finds
out within these, and may wait for a store that starts."""

KEPT = ("committed", "evaluated")
"""Final states of everything that was not lost."""

_TOLD = re.compile(
    r"^run \S+: (?P<name>[^/ ]+/\d+/\d+)\b.*"
    r"(and the store lost it|the store came back without)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A time at which a store lost its unsynced data.

    Attributes:
        at: time of the machine's monotonic clock; later answers come from the restarted store.
        planned: number of remaining steps.
        newest_version: newest remaining version; -1 without one.
        seals: trajectories whose seal was attempted, and is missing.
        openings: trajectories whose opening was attempted, and is missing.
        rewards: trajectories whose posted reward is missing.
    """

    at: float
    planned: int
    newest_version: int
    seals: frozenset[str] = frozenset()
    openings: frozenset[str] = frozenset()
    rewards: frozenset[str] = frozenset()


def look_at(
    data_dir: Path, lines: Sequence[Line], *, run: str, binary: Path | None, at: float
) -> Cut:
    """Return the cut that a server with a copy of these data shows.

    Args:
        data_dir: data of a killed server.
        lines: lines that were read after the kill.
        run: name of the run.
        binary: program of the server.
        at: time of the kill.
    """
    copy = data_dir.with_name(f"{data_dir.name}-cut")
    shutil.copytree(data_dir, copy)
    try:
        with EmbeddedServer(copy, binary=binary) as server, connect(server.url) as client:
            planned = read_frontier(client, run).planned
            newest = newest_version(client, run)
            missing = dict(_missing(client, run, lines, planned=planned, at=at))
    finally:
        shutil.rmtree(copy)
    return Cut(
        at=at,
        planned=planned,
        newest_version=-1 if newest is None else newest.version,
        seals=frozenset(name for name, state in missing.items() if not _is_sealed(state)),
        openings=frozenset(name for name, state in missing.items() if not state),
        rewards=frozenset(missing).intersection(_posted(lines)),
    )


def _missing(
    client: redis.Redis, run: str, lines: Sequence[Line], *, planned: int, at: float
) -> Iterator[tuple[str, str]]:
    """Trajectories of the last seconds that lack a seal or a reward, and their states.

    These are "open", "awaiting_reward", or "".
    """
    newest = [line for line in lines if line.at > at - FORGOTTEN_S]
    names = list(dict.fromkeys([*_written(newest), *_posted(newest)]))
    if not names:
        return
    batches = (line for line in lines if line.kind == "received" and line["step"] <= planned)
    known = {row["trajectory"] for line in batches for row in line["rows"]}
    entries: Any = client.hmget(keys.run_keys(run).ledger, names)
    for name, entry in zip(names, entries, strict=True):
        if name in known:
            continue
        state = entry.decode() if entry else state_of(client, run, name)
        if not state or state.startswith("open") or _is_sealed(state):
            yield name, state


def _is_sealed(state: str) -> bool:
    """Whether only its reward can be missing."""
    return state.startswith("awaiting_reward")


def _posted(lines: Iterable[Line]) -> Iterator[str]:
    """Trajectories of which a reward was posted, or somebody was about to post it."""
    return (line["trajectory"] for line in lines if line.kind == "posting")


def state_of(client: redis.Redis, run: str, name: str) -> str:
    """Return the state of a trajectory that is not in the ledger; empty if there is none."""
    try:
        return str(history_of(client, run, keys.parse_trajectory_id(name)).state)
    except TrajectoryNotFoundError:
        return ""


def _written(lines: Iterable[Line]) -> Iterator[str]:
    """Yield the trajectories that generators have opened or sealed."""
    for line in lines:
        if line.kind == "sealing":
            yield line["trajectory"]
        elif line.kind == "given":
            yield from line["trajectories"]
        elif line.kind == "opening":
            yield from (f"{line['group']}/{sample}/0" for sample in range(line["num_samples"]))


def told_as_lost(folder: Path) -> dict[str, set[str]]:
    """Trajectories that publishers have named as lost, by the process that did."""
    found: dict[str, set[str]] = {}
    for path in folder.glob("generator-*.log"):
        text = path.read_text(encoding="utf-8", errors="replace")
        found[path.stem] = {_encoded(told["name"]) for told in _TOLD.finditer(text)}
    return found


def _encoded(name: str) -> str:
    """A trajectory's id, also of a name for people.

    >>> _encoded("p7#1/0/0"), _encoded("p7%231/0/0")
    ('p7%231/0/0', 'p7%231/0/0')
    """
    group, _, rest = name.partition("/")
    return name if "%" in group else f"{keys.encode_name(group)}/{rest}"


class Gone(NamedTuple):
    """Trajectories of which something may be gone for good.

    Attributes:
        seals: their seal.
        openings: all of them.
        rewards: the reward that was posted.
    """

    seals: set[str]
    openings: set[str]
    rewards: set[str]


def gone_for_good(lines: Sequence[Line], cuts: Sequence[Cut], *, logs: Path) -> Gone:
    """Return the losses of cuts that no surviving process had to resend.

    Args:
        lines: lines of all processes.
        cuts: cuts in order of time.
        logs: folder with the logs of publishers.
    """
    if not cuts:
        return Gone(set(), set(), set())
    seals, openings = gone_with_their_writers(lines, cuts, told=told_as_lost(logs))
    return Gone(seals, openings, gone_with_their_posters(lines, cuts))


def gone_with_their_writers(
    lines: Sequence[Line], cuts: Sequence[Cut], *, told: dict[str, set[str]]
) -> tuple[set[str], set[str]]:
    """Return the trajectories whose seal, and whose opening, may be lost.

    Their generator died before it had to resend them, or reported them as lost.
    """
    writers: dict[str, set[str]] = {}
    lives = _Lives()
    for line in lines:
        lives.add(line)
        for name in _written([line]):
            writers.setdefault(name, set()).add(line.process)
    seals: set[str] = set()
    openings: set[str] = set()
    for cut in cuts:
        for name in cut.seals:
            if all(
                not lives.has_outlived(writer, cut) or name in told.get(writer, ())
                for writer in writers[name]
            ):
                seals.add(name)
                openings |= {name} & cut.openings
    return seals, openings


def gone_with_their_posters(lines: Sequence[Line], cuts: Sequence[Cut]) -> set[str]:
    """Return the trajectories whose reward may be lost with its poster."""
    posters: dict[str, set[str]] = {}
    lives = _Lives()
    for line in lines:
        lives.add(line)
        for name in _posted([line]):
            posters.setdefault(name, set()).add(line.process)
    return {
        name
        for cut in cuts
        for name in cut.rewards
        if not any(lives.has_outlived(poster, cut) for poster in posters[name])
    }


class _Lives:
    """How long each process was there."""

    def __init__(self) -> None:
        self._last_seen: dict[str, float] = {}
        self._done: dict[str, float] = {}

    def add(self, line: Line) -> None:
        """It wrote this."""
        last = self._last_seen.get(line.process, line.at)
        self._last_seen[line.process] = max(line.at, last)
        if line.kind == "done":
            self._done[line.process] = line.at

    def has_outlived(self, process: str, cut: Cut) -> bool:
        """Whether it has sent again what a cut took: it lived on, or came to a good end."""
        is_done = self._done.get(process, 0.0) > cut.at
        return is_done or self._last_seen[process] >= cut.at + SENT_AGAIN_S
