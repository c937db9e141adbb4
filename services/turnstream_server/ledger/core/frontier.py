"""How far a run is: planned, stepped, committed, and who trains it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import redis
import redis.asyncio

from turnstream.errors import ReleasedError
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import no_such_run
from turnstream.store.client.stored_values import StoredHash, parsed_number, reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The origin of a forked run: its last common batch, and the trajectories up to it.

    The manifest hash of step 0 is empty.
    """

    run: str
    step: int
    num_trajectories: int
    manifest_hash: str

    def __str__(self) -> str:
        run = keys.encode_name(self.run)
        return f"{run}:{self.step}:{self.num_trajectories}:{self.manifest_hash}"

    @classmethod
    def parse(cls, text: str) -> Origin:
        """Read what `str(origin)` wrote."""
        run, step, num_trajectories, manifest_hash = text.split(":")
        return cls(
            run=keys.decode_name(run),
            step=int(step),
            num_trajectories=int(num_trajectories),
            manifest_hash=manifest_hash,
        )


class Rollback(NamedTuple):
    """A new lineage, its last common batch with the one before, and the last stepped before it."""

    lineage: str
    step: int
    stepped: int

    @classmethod
    def parse(cls, text: str) -> Rollback:
        """Read one of the frontier.

        >>> Rollback.parse("main-1:4:7")
        Rollback(lineage='main-1', step=4, stepped=7)
        """
        lineage, step, stepped = text.rsplit(":", 2)
        return cls(lineage, int(step), int(stepped))


class Withdrawn(NamedTuple):
    """How often plans of the run were withdrawn, and the newest step that ever was."""

    revision: int = 0
    through_step: int = 0

    @classmethod
    def parse(cls, value: bytes) -> Withdrawn:
        """Read the field of the frontier.

        >>> Withdrawn.parse(b"1:7")
        Withdrawn(revision=1, through_step=7)
        """
        revision, through_step = map(int, value.split(b":"))
        return cls(revision, through_step)


NONE_WITHDRAWN: Final = Withdrawn()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The numbers of a run at one time.

    Attributes:
        planned: newest batch that has a manifest; 0 before the first.
        stepped: newest batch that the optimizer has taken.
        committed: newest batch that a checkpoint on disk holds.
        session_epoch: fencing number of the trainer session; 0 before the first.
        lineage: name of the history; another one after every rollback.
        num_live_groups: opened groups that were not dropped untrained.
        num_open_groups: live groups that are neither decided nor planned.
        is_closed: no group will be opened any more.
        released: newest batch that is no longer retained; 0 before the first.
        version_floor: the highest version that the origin has announced; -1: none.
        next_revision: first step of the next config that is not in force; 0 without one.
        is_finished: the run is closed, and no batch follows `planned`.
        paused: reason of the pause; None if the run is not paused.
        rollbacks: the newest rollbacks, the last one first.
        lost_session: the step in which the store differs from a rank of the session; "" for none.
        replan: name of a request to plan again that no leader has answered yet; empty for none.
        withdrawn: plans that were withdrawn because of damage.
    """

    planned: int
    stepped: int
    committed: int
    session_epoch: int
    session: str
    dp_world_size: int
    lineage: str
    num_opened_groups: int
    num_live_groups: int
    is_closed: bool
    released: int = 0
    num_open_groups: int = 0
    origin: Origin | None = None
    version_floor: int = -1
    next_revision: int = 0
    paused: str | None = None
    is_finished: bool = False
    rollbacks: tuple[Rollback, ...] = ()
    lost_session: str = ""
    replan: str = ""
    withdrawn: Withdrawn = NONE_WITHDRAWN

    @property
    def has_session(self) -> bool:
        """Return whether a trainer session is active; withdrawn plans end it."""
        return bool(self.session_epoch and self.session)

    def revision_of(self, step: int) -> int:
        """Return the revision of the next plan of a step: 0, or higher after withdrawals."""
        return self.withdrawn.revision if step <= self.withdrawn.through_step else 0

    @property
    def pause(self) -> str:
        """Return a pause in words, or an empty text."""
        if self.paused is None:
            return ""
        return f"the run is paused: {self.paused}" if self.paused else "the run is paused"


def not_retained(step: int, frontier: Frontier) -> ReleasedError:
    """The refusal of a step that is released."""
    return ReleasedError(
        f"step {step} is no longer retained: the oldest batch kept is {frontier.released + 1}"
    )


def read_frontier(client: redis.Redis, run: str) -> Frontier:
    """Return the frontier of a run."""
    name = keys.run_keys(run).frontier
    with reading(name), translating():
        fields: Any = client.execute_command("HGETALL", name)
    return parse_frontier(run, fields)


async def read_frontier_async(client: redis.asyncio.Redis, run: str) -> Frontier:
    """Return the frontier of a run."""
    name = keys.run_keys(run).frontier
    with reading(name), translating():
        fields: Any = await client.execute_command("HGETALL", name)
    return parse_frontier(run, fields)


def _rollbacks(value: bytes) -> tuple[Rollback, ...]:
    return tuple(Rollback.parse(each) for each in value.decode().split(",") if each)


def parse_frontier(run: str, fields: dict[bytes, bytes]) -> Frontier:
    """Return the frontier with these stored fields."""
    if not fields:
        raise no_such_run(run)
    stored = StoredHash(keys.run_keys(run).frontier, fields)
    number = stored.number
    number_needed = partial(stored.needed, parse=parsed_number)
    return Frontier(
        planned=number("planned"),
        stepped=number_needed("stepped"),
        committed=number_needed("committed"),
        session_epoch=number_needed("session_epoch"),
        session=stored.needed("session", bytes.decode),
        dp_world_size=number_needed("dp_world_size"),
        lineage=stored.needed("lineage", bytes.decode),
        num_opened_groups=number_needed("opened_groups"),
        num_live_groups=number_needed("live_groups"),
        is_closed=stored.needed("closed", bytes) == b"1",
        released=number("released"),
        num_open_groups=number("open_groups"),
        origin=stored.parsed("origin", lambda value: Origin.parse(value.decode()), None),
        version_floor=stored.parsed("version_floor", parsed_number, -1),
        next_revision=number("next_revision"),
        is_finished=fields.get(b"finished") == b"1",
        paused=stored.parsed("paused", bytes.decode, None),
        rollbacks=stored.parsed("rollbacks", _rollbacks, ()),
        lost_session=_sentence(fields.get(b"session_lost", b"")),
        replan=stored.text("replan"),
        withdrawn=stored.parsed("withdrawn", Withdrawn.parse, NONE_WITHDRAWN),
    )


def _sentence(value: bytes) -> str:
    """Return the text after the step; it may quote damaged bytes."""
    return value.decode(errors="replace").partition(":")[2]
