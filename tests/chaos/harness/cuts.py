"""What a store under everysec was left with when its power was cut, and what that excuses.

The data are looked at before anybody can send anything again. From then on two histories are told::

    steps 1 ... 7 are planned | cut: 5 of them are left | steps 6 and 7 are planned anew

Of what is gone, a publisher that lives has to send all again. What is gone with a generator that
died is gone for good, and nothing else.
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
from turnstream.store import keys
from turnstream.store.connection import connect
from turnstream.store.runs import newest_version
from turnstream_server.bus.frontier import read_frontier
from turnstream_server.bus.trajectory_history import TrajectoryNotFoundError, history_of
from turnstream_server.embedded import EmbeddedServer

SENT_AGAIN_S = 15.0
"""A publisher that lives for so long behind a cut has sent all again: it keeps five seconds, finds
out within these, and may wait for a store that starts."""

KEPT = ("committed", "evaluated")
"""What becomes of whatever was not lost, in a run that was trained to its end."""

_TOLD = re.compile(
    r"^run \S+: (?P<name>[^/ ]+/\d+/\d+)\b.*"
    r"(and the store lost it|the store came back without)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A moment at which a store lost what it had not synced.

    Attributes:
        at: by the machine's monotonic clock; behind it, nothing is answered by the store that was.
        planned: steps that are left.
        newest_version: that was announced, of what is left; -1 without one.
        seals: trajectories whose seal was tried, and is not there.
        openings: trajectories that were opened, or whose opening was tried, and are not there.
        rewards: trajectories that have not, or no longer, a reward that was posted.
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
    """What a server that starts with these data has; they are copied.

    Args:
        data_dir: of a server that was killed.
        lines: read after the kill.
        run: name of the run.
        binary: the server to ask.
        at: when it was killed.
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
    """Of one that has left the ledger, or was never in it: then empty."""
    try:
        return str(history_of(client, run, keys.parse_trajectory_id(name)).state)
    except TrajectoryNotFoundError:
        return ""


def _written(lines: Iterable[Line]) -> Iterator[str]:
    """Trajectories that generators have begun or sealed."""
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
    """What cuts have taken, and nobody who lived on had to send again.

    Args:
        lines: of all processes.
        cuts: in order of time.
        logs: a folder with what publishers have said.
    """
    if not cuts:
        return Gone(set(), set(), set())
    seals, openings = gone_with_their_writers(lines, cuts, told=told_as_lost(logs))
    return Gone(seals, openings, gone_with_their_posters(lines, cuts))


def gone_with_their_writers(
    lines: Sequence[Line], cuts: Sequence[Cut], *, told: dict[str, set[str]]
) -> tuple[set[str], set[str]]:
    """What may be gone for good: trajectories as sealed, and as opened at all.

    Those that a cut has taken and whose generator died before it had to have sent them again, or
    was told by name that they are lost.
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
    """Trajectories whose reward may be gone for good: who posted it has not outlived the cut."""
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
