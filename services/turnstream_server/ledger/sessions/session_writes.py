"""Decisions about the calls of trainer sessions: pure functions from facts to writes.

Every call of another session than the current one raises FencedError.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from turnstream.errors import (
    ConflictError,
    FencedError,
    NotReadyError,
    ReleasedError,
    StoreBehindError,
)
from turnstream.records.events import encode_event
from turnstream.store.client.stored_values import parsed_number
from turnstream.types import RecoveryToken, RolledBack, VersionAnnounced
from turnstream_server.ledger.core.frontier import Frontier, Rollback
from turnstream_server.ledger.leadership.writes import Changes

_MAX_ROLLBACKS: Final = 16
"""Stored rollbacks: every reader of the frontier reads them."""

VERSIONS: Final = ("XREVRANGE", "versions", "+", "-", "COUNT", 16)
"""The newest versions, to find the one before a step. A step has one, as a rule."""

_FORKED: Final = re.compile(r"(.*)-(\d+)")


class TrainerRank(NamedTuple):
    """The rank and the session of a call. Without a name any session of the epoch may call.

    A store that lost a session may reuse its epoch.
    """

    epoch: int
    name: str = ""
    dp_rank: int = 0


class TrainerSession(NamedTuple):
    """A trainer session, with its fencing number, and the run before it.

    Attributes:
        newest_version: the highest version announced so far; -1 before the first.
    """

    session_epoch: int
    next_step: int
    lineage: str
    previous_stepped: int
    previous_committed: int
    newest_version: int

    @property
    def returning_steps(self) -> range:
        """Batches that were stepped before and will be trained again."""
        return range(self.next_step, self.previous_stepped + 1)

    @property
    def is_rollback(self) -> bool:
        """Whether batches that were committed will be trained again."""
        return self.next_step <= self.previous_committed


class Facts(NamedTuple):
    """The facts in the store about a call for a step.

    Attributes:
        fields: the stored fields of the frontier.
        batch: entry of the step in `batches`; None if it has none.
        newest: id of the newest announced version; "0-0" before the first.
        noted: record of the call in `ranks`, `sessions` or `versions`; None where it is missing.
    """

    now_ms: int
    frontier: Frontier
    fields: Mapping[bytes, bytes]
    step: int
    batch: bytes | None = None
    newest: str = "0-0"
    noted: bytes | None = None

    @property
    def manifest_hash(self) -> str | None:
        """The hash of the manifest of the step; empty for step 0, None for an unknown step."""
        if not self.step or self.batch is None:
            return None if self.step else ""
        return self.batch.decode(errors="replace").partition(":")[2]

    @property
    def newest_version(self) -> int:
        """The highest version announced so far; -1 before the first."""
        return max(self.frontier.version_floor, int(self.newest.partition("-")[0]) - 1)

    def expected(self, *fields: str) -> Changes:
        """Return changes that expect the session, the batch, and these fields of the frontier."""
        changes = Changes()
        for name in ("session_epoch", "session", "session_lost", *fields):
            changes.expect("frontier", name, self.fields.get(name.encode()))
        if self.step:
            changes.expect("batches", str(self.step), self.batch)
        return changes

    def check_rank(self, dp_rank: int) -> None:
        """Refuse a rank that the session does not have."""
        if dp_rank >= (num_ranks := self.frontier.dp_world_size):
            raise ConflictError(
                f"dp_rank {dp_rank} is none of the {num_ranks} ranks of the session"
            )

    def check_manifest(self, own: str) -> None:
        """Refuse a step from another manifest."""
        if self.manifest_hash != own:
            there = self.manifest_hash or ""
            raise ConflictError(f'step {self.step} has the manifest "{there}", not "{own}"')


def check_session(frontier: Frontier, caller: TrainerRank) -> None:
    """Refuse a call of another session; withdrawn plans leave a session without a name."""
    epoch, name = frontier.session_epoch, frontier.session
    why = ""
    if caller.epoch > epoch:
        why = f"{caller.epoch} was lost, the newest of the store is {epoch}"
    elif caller.epoch < epoch and not name:
        why = f"{caller.epoch} has ended: payload was damaged and plans were withdrawn; start "
        why += "another session with the token of the last checkpoint"
    elif caller.epoch != epoch:
        why = f"{caller.epoch} has ended, {epoch} has begun"
    elif caller.name not in {"", name}:
        why = f'"{caller.name}" has ended or was lost, "{name}" has its epoch'
    if why:
        raise FencedError(f"trainer session {why}")


def check_lost(frontier: Frontier) -> None:
    """Refuse every call of a lost session."""
    if frontier.lost_session:
        raise StoreBehindError(frontier.lost_session)


def start(
    facts: Facts, *, session: str, dp_world_size: int, token: RecoveryToken | None
) -> tuple[TrainerSession, Sequence[Changes]]:
    """Return a session, and the writes that start it; none where it has started.

    Steps after the one of the token are undone. Admission waits for announcements once the session
    has announced a version. So a session that announces none does not stop the run.
    """
    frontier, step = facts.frontier, facts.step
    stepped, committed = frontier.stepped, frontier.committed
    epoch, lineage = frontier.session_epoch, frontier.lineage
    own = ":" if token is None else f"{step}:{token.chain_hash}"
    started = TrainerSession(epoch, stepped + 1, lineage, stepped, committed, facts.newest_version)
    if frontier.session == session:
        _check_repeat(facts, own, session=session, dp_world_size=dp_world_size)
        return started, ()
    if facts.noted is not None:  # a call of a killed rank may arrive late
        ended = facts.noted.decode()
        raise FencedError(f"trainer session {ended} has ended, {epoch} has begun")
    _check_token(facts, token)

    changes = facts.expected("stepped", "committed", "released", "checkpoints")
    changes.expect_newest("versions", facts.newest)
    if step != stepped:
        lineage = next_lineage(lineage)
        rollbacks = [Rollback(lineage, step, stepped), *frontier.rollbacks][:_MAX_ROLLBACKS]
        texts = [f"{each.lineage}:{each.step}:{each.stepped}" for each in rollbacks]
        changes.write("HSET", "frontier", "rollbacks", ",".join(texts))
        changes.write_entry("events", encode_event(RolledBack(step=step)))
    undone = range(step + 1, stepped + 1)
    kinds = ("stepped", "committed")
    changes.write_each("HDEL", "times", [f"{kind}:{each}" for each in undone for kind in kinds])
    if step:
        changes.write("HSETNX", "times", f"committed:{step}", facts.now_ms)
    earlier = re.findall(rb"\d+", facts.fields.get(b"checkpoints", b""))
    kept = [each for each in earlier if int(each) < step] + [b"%d" % step] * (step > 0)
    changes.write(
        *("HSET", "frontier", "stepped", step, "committed", step, "session_epoch", epoch + 1),
        *("session", session, "session_ms", facts.now_ms, "session_token", own),
        *("dp_world_size", dp_world_size, "lineage", lineage, "checkpoints", b",".join(kept)),
    )
    changes.write("HDEL", "frontier", "session_lost", "announced")
    changes.write("DEL", "ranks")
    changes.write("HSET", "sessions", session, epoch + 1)
    changes.wake()
    started = started._replace(session_epoch=epoch + 1, next_step=step + 1, lineage=lineage)
    return started, [changes]


def _check_repeat(facts: Facts, own: str, *, session: str, dp_world_size: int) -> None:
    began_with = facts.fields.get(b"session_token", b"").decode()
    ranks, stepped = facts.frontier.dp_world_size, facts.frontier.stepped
    other_name = "every start of a trainer needs a session name of its own"
    if (began_with, ranks) != (own, dp_world_size):
        raise ConflictError(
            f'session {session} began with the token "{began_with}" for {ranks} ranks, '
            f'not with "{own}" for {dp_world_size}; {other_name}'
        )
    check_lost(facts.frontier)
    if stepped != facts.step:
        raise ConflictError(f"session {session} is at step {stepped} already; {other_name}")


def _check_token(facts: Facts, token: RecoveryToken | None) -> None:
    committed, released = facts.frontier.committed, facts.frontier.released
    if token is None and committed:
        raise ConflictError(
            f"the run is committed up to step {committed}; present the recovery token of a "
            "checkpoint, or the token of step 0 to begin again"
        )
    if token is None:
        return
    if token.step < released:
        raise ReleasedError(
            f"the token names step {token.step}, but the steps up to {released} are no longer "
            f"retained: the oldest token that can be taken up is that of step {released}"
        )
    own = facts.manifest_hash
    if own is None:
        raise StoreBehindError(
            f"the token names step {token.step}, "
            f"but the newest batch of this store is {facts.frontier.planned}"
        )
    if own != token.chain_hash:
        raise StoreBehindError(
            f'the token names the manifest "{token.chain_hash}" as step {token.step}, '
            f'this store has "{own}"'
        )


def next_lineage(lineage: str) -> str:
    """Return the name of the history after a rollback.

    >>> [next_lineage(each) for each in ("main", "main-1", "maze@12-9")]
    ['main-1', 'main-2', 'maze@12-10']
    """
    forked = _FORKED.fullmatch(lineage)
    return f"{forked[1]}-{int(forked[2]) + 1}" if forked else f"{lineage}-1"


def deliver(
    facts: Facts, caller: TrainerRank, *, manifest_hash: str, has: bool
) -> tuple[Frontier, Sequence[Changes]]:
    """Return the frontier, and the writes for a batch that a rank has, or is about to get.

    A rank with a batch that the store lost, or with another manifest, ends the session: its ranks
    may train different data. Then the frontier has a lost session.
    """
    frontier, step, there = facts.frontier, facts.step, facts.manifest_hash
    check_session(frontier, caller)
    check_lost(frontier)
    if step < frontier.released:
        return frontier, ()  # a late call
    if there == manifest_hash:
        own, newest = f"{step}:{there}".encode(), re.match(rb"(\d+):", facts.noted or b"")
        is_known = facts.noted == own or (newest is not None and int(newest[1]) > step)
        if is_known or frontier.dp_world_size <= 1:
            return frontier, ()
        changes = facts.expected()
        changes.expect("ranks", str(caller.dp_rank), facts.noted)
        changes.write("HSET", "ranks", str(caller.dp_rank), own)
        return frontier, [changes]
    if not has:
        raise NotReadyError(f"step {step}: its plan is not in the store any more")
    differs = f'this store has "{there}" as step {step}'
    if there is None:
        differs = f"but the newest batch of this store is {frontier.planned}"
    why = (
        f"step {step} was delivered to dp_rank {caller.dp_rank} from the manifest "
        f'"{manifest_hash}", {differs}: begin a new session from the last checkpoint'
    )
    changes = facts.expected("released")
    changes.write("HSET", "frontier", "session_lost", f"{step}:{why}")
    changes.wake()
    return dataclasses.replace(frontier, lost_session=why), [changes]


def damage(facts: Facts, *, manifest_hash: str, sentence: str) -> tuple[None, Sequence[Changes]]:
    """Return the write that records damaged payload of a step; none for a stepped or other plan."""
    if facts.step <= facts.frontier.stepped or facts.manifest_hash != manifest_hash:
        return None, ()
    changes = facts.expected("stepped")
    changes.write("HSET", "frontier", "damaged", f"{facts.step}:{manifest_hash}:{sentence}")
    return None, [changes]


def step(facts: Facts, caller: TrainerRank, *, manifest_hash: str) -> tuple[str, Sequence[Changes]]:
    """Return the lineage, and the writes of a rank; the last of them awaits all ranks.

    Its last command reads the newest versions, as they are once all ranks have called: rank 0 may
    announce one before its call.
    """
    frontier = facts.frontier
    check_session(frontier, caller)
    check_lost(frontier)
    planned, stepped = frontier.planned, frontier.stepped
    if facts.step > planned:
        raise StoreBehindError(
            f'step {facts.step} was trained from the manifest "{manifest_hash}", '
            f"but the newest batch of this store is {planned}"
        )
    if facts.step > stepped + 1:
        raise ConflictError(f"step {facts.step} does not follow step {stepped}")
    facts.check_rank(caller.dp_rank)
    facts.check_manifest(manifest_hash)
    if facts.step <= stepped:
        return frontier.lineage, ()
    own, of_all = (facts.expected("stepped") for _ in range(2))
    entry = f"{facts.step}:{manifest_hash}"
    own.write("HSET", "ranks", f"stepped:{caller.dp_rank}", entry)
    ranks = [f"stepped:{rank}" for rank in range(frontier.dp_world_size)]
    of_all.expect_prefix("ranks", entry, ranks)
    of_all.write("HSET", "frontier", "stepped", facts.step)
    of_all.write("HSET", "times", f"stepped:{facts.step}", facts.now_ms)
    of_all.wake()
    of_all.write(*VERSIONS)
    of_all.awaits = "ranks"
    return frontier.lineage, [own, of_all]


def commit(facts: Facts, caller: TrainerRank, *, chain_hash: str) -> tuple[None, Sequence[Changes]]:
    """Return the writes of a rank; the last of them awaits all ranks."""
    frontier = facts.frontier
    check_session(frontier, caller)
    lost = facts.fields.get(b"session_lost", b"").partition(b":")[0]
    if lost and facts.step >= parsed_number(lost):
        check_lost(frontier)
    if facts.step > frontier.stepped:
        newest = f"the newest such step is {frontier.stepped}"
        raise ConflictError(f"step {facts.step} is not stepped; {newest}")
    facts.check_manifest(chain_hash)
    if facts.step <= frontier.committed:
        return None, ()
    facts.check_rank(caller.dp_rank)
    own, of_all = (facts.expected("committed", "checkpoints") for _ in range(2))
    newest = max(facts.step, parsed_number(facts.noted or b"0"))
    own.expect("ranks", f"committed:{caller.dp_rank}", facts.noted)
    own.write("HSET", "ranks", f"committed:{caller.dp_rank}", newest)
    ranks = [f"committed:{rank}" for rank in range(frontier.dp_world_size)]
    of_all.expect_least("ranks", facts.step, ranks)
    earlier = facts.fields.get(b"checkpoints")
    checkpoints = b"%b,%d" % (earlier, facts.step) if earlier else b"%d" % facts.step
    of_all.write("HSET", "frontier", "committed", facts.step, "checkpoints", checkpoints)
    of_all.write("HSET", "times", f"committed:{facts.step}", facts.now_ms)
    of_all.wake()
    of_all.awaits = "ranks"
    return None, [own, of_all]


def announce(
    facts: Facts, caller: TrainerRank, announced: VersionAnnounced
) -> tuple[None, Sequence[Changes]]:
    """Return the writes that announce new weights, once."""
    frontier, version = facts.frontier, announced.version
    check_session(frontier, caller)
    announced = dataclasses.replace(announced, lineage=announced.lineage or frontier.lineage)
    record = encode_event(announced)
    if announced.lineage != frontier.lineage:
        raise FencedError(
            f'the run goes on in lineage "{frontier.lineage}", not in "{announced.lineage}"'
        )
    if facts.noted not in {None, record}:
        raise ConflictError(f"version {version} was announced with another content")
    if facts.noted is None and version <= facts.newest_version:
        newest = f"{facts.newest_version}, the newest announced"
        raise ConflictError(f"version {version} is not above {newest}")
    is_of_newer_step = announced.step > parsed_number(facts.fields.get(b"announced", b"-1"))
    if facts.noted and not is_of_newer_step:
        return None, ()
    changes = facts.expected("announced", "lineage")
    changes.expect_newest("versions", facts.newest)
    if facts.noted is None:
        changes.write("XADD", "versions", f"{version + 1}-0", "r", record)
        changes.write_entry("events", record)
    if is_of_newer_step:
        changes.write("HSET", "frontier", "announced", announced.step)
        changes.wake()
    return None, [changes]
