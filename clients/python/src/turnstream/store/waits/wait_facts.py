"""The state of a run that a generator's wait depends on, read when the wait times out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis
import redis.asyncio

from turnstream.batching.config import BatchingConfig
from turnstream.errors import TurnstreamError
from turnstream.records.configs import decode_config
from turnstream.store.client import keys
from turnstream.store.client.fullness import LEAST_ESTIMATE, Bytes
from turnstream.store.client.scripts import Command, Script, run_command, run_command_async
from turnstream.store.waits.pass_rate import RecentGroups, recent_groups
from turnstream.store.waits.wait_durations import NOT_NOTED, Lasting, lasting, ranks_behind
from turnstream.types import TrajectoryKey

MAX_LEASES: Final = 512
"""With more open trajectories no generator counts as gone: an unread lease may last."""

MAX_NAMED: Final = 8
"""Trajectories, and generators, that are named."""

READ_WAITS = Script("read_waits", "turnstream.store.waits")

_STATES: Final = ("filtered", "expired", "abandoned", "incomplete", "dead")
_FIRST_ESTIMATE: Final = 65_536  # see open_group.lua


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMember:
    """A trajectory that is being written.

    Attributes:
        writer: owner of its lease.
        lease_left_s: time left of its lease; 0 or below after it has lapsed.
        deadline_left_s: until its group's deadline; None without one.
    """

    key: TrajectoryKey
    writer: str
    lease_left_s: float
    deadline_left_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitFacts:
    """The state of a run at one time.

    Attributes:
        stepped, planned: newest stepped and newest planned batch.
        planned_groups: groups in batches.
        released: newest batch whose payload may be released.
        num_live: groups that were opened and not dropped.
        num_open: live groups that are not decided.
        num_opened: groups ever opened.
        num_revised, at_plans: see store.keys.
        session_epoch: epoch of the trainer session; 0 before the first.
        paused: reason of the pause; None if the run is not paused.
        planner: name of the batcher that planned last; empty before the first.
        planner_left_s: time left of its lease.
        reserved, stored, planned_bytes: see `budget` in store.keys.
        estimate: usual bytes of a trajectory.
        server_used, server_max: bytes of the server; 0 for no limit.
        prompts_added, prompts_left, prompts_given: added to the run, not granted, and granted
            but not done.
        num_refills: granted attempts that no generator has taken.
        newest_version: newest policy version; None before the first.
        untrained: (state, trajectories) that ended untrained.
        num_leases: trajectories that are being written.
        members: the first of these by the end of their leases; at most MAX_LEASES.
        lasting: durations of the current state.
        behind: ranks that have not asked for the step to train.
    """

    run: str
    config: BatchingConfig
    stepped: int
    planned: int
    planned_groups: int
    released: int
    num_live: int
    num_open: int
    num_opened: int
    num_revised: int
    session_epoch: int
    is_closed: bool
    paused: str | None
    at_plans: str
    planner: str
    planner_left_s: float
    reserved: int
    stored: int
    planned_bytes: int
    estimate: int
    server_used: int
    server_max: int
    prompts_added: int
    prompts_left: int
    prompts_given: int
    num_refills: int
    newest_version: int | None
    untrained: tuple[tuple[str, int], ...]
    num_leases: int
    members: tuple[HeldMember, ...]
    lasting: Lasting = NOT_NOTED
    behind: tuple[int, ...] = ()

    @property
    def num_ready(self) -> int:
        """Groups that are decided, and in no batch."""
        return max(0, self.num_live - self.num_open - self.planned_groups)

    @property
    def recent(self) -> RecentGroups:
        """The groups that were decided lately."""
        return recent_groups(
            self.at_plans,
            num_dropped=self.num_opened - self.num_live,
            num_in_batches=self.planned_groups,
            num_ready=self.num_ready,
        )

    @property
    def is_starved(self) -> bool:
        """Whether the trainer waits for groups."""
        return self.planned <= self.stepped and self.num_ready < self.config.batch_groups

    @property
    def bytes(self) -> Bytes:
        """Bytes used and allowed; the next group is one of a single sample."""
        return Bytes(
            used=self.server_used,
            allowed=self.server_max,
            reserved=self.reserved,
            stored=self.stored,
            planned=self.planned_bytes,
            needed=max(LEAST_ESTIMATE, self.estimate),
            max_bytes=self.config.max_bytes,
        )

    @property
    def is_held_by_groups(self) -> bool:
        """Whether what comes next waits for groups that are under way."""
        is_full = 0 < self.config.max_open_groups <= self.num_open
        return self.is_starved or is_full or self.prompts_given > 0


def waits_command(run: str) -> Command:
    """The call that reads what a wait may hang on; nothing is sent. See read_waits.lua."""
    names = keys.run_keys(run)
    where = (
        *(names.frontier, names.config, names.leader, names.budget, names.prompts, names.again),
        *(names.leases, names.ledger, names.refills, names.versions, names.counts),
        names.deadlines,
        *(names.clock, names.times, names.ranks, names.events, names.wake),
    )
    return READ_WAITS(where, MAX_LEASES, MAX_NAMED)


def read_waits(client: redis.Redis, run: str) -> WaitFacts | None:
    """Return the state of a run; None if the store cannot return it.

    It accompanies an error, and must not hide it.
    """
    try:
        return parse_waits(run, run_command(client, waits_command(run)))
    except TurnstreamError:
        return None


async def read_waits_async(client: redis.asyncio.Redis, run: str) -> WaitFacts | None:
    """The same as `read_waits`, for asyncio."""
    try:
        return parse_waits(run, await run_command_async(client, waits_command(run)))
    except TurnstreamError:
        return None


def parse_waits(run: str, reply: Sequence[Any]) -> WaitFacts:
    """Return the state from the reply of the script.

    Raises:
        RecordError: the config is of a newer release.
    """
    now, frontier, config, leader, budget, prompts, refills, last_id, *reply = reply
    ended, memory, num, held, run_ms, step_ms, (dp_world_size, ranks) = reply
    now_ms = int(now)
    *numbers, closed, paused, at_plans = frontier
    stepped, planned, planned_groups, released, live, opened, ever, revised, epoch = _ints(numbers)
    reserved, stored, planned_bytes, _ = _ints(budget)
    added, last, done, again = _ints(prompts)
    used, most = _ints(memory)
    owner, expires_ms = leader
    return WaitFacts(
        run=run,
        config=decode_config(config, run=run),
        stepped=stepped,
        planned=planned,
        planned_groups=planned_groups,
        released=released,
        num_live=live,
        num_open=opened,
        num_opened=ever,
        num_revised=revised,
        session_epoch=epoch,
        is_closed=closed == b"1",
        paused=None if paused is None else paused.decode(),
        at_plans=(at_plans or b"").decode(),
        planner=(owner or b"").decode(),
        planner_left_s=(int(expires_ms or now_ms) - now_ms) / 1_000,
        reserved=reserved,
        stored=stored,
        planned_bytes=planned_bytes,
        estimate=int(budget[3] or _FIRST_ESTIMATE),
        server_used=used,
        server_max=most,
        prompts_added=added,
        prompts_left=added - last + again,
        prompts_given=last - again - done,
        num_refills=refills,
        newest_version=None if last_id is None else int(last_id.partition(b"-")[0]) - 1,
        untrained=tuple(
            (state, count) for state, count in zip(_STATES, _ints(ended), strict=True) if count
        ),
        num_leases=num,
        members=tuple(_members(held, now_ms)),
        lasting=lasting(now_ms, run_ms, step_ms),
        behind=ranks_behind(
            dict(zip(ranks[::2], ranks[1::2], strict=True)),
            dp_world_size=int(dp_world_size),
            step=stepped + 1,
        ),
    )


def _ints(words: Sequence[bytes | int | None]) -> list[int]:
    return [int(word or 0) for word in words]


def _members(held: Sequence[Any], now_ms: int) -> Iterator[HeldMember]:
    """Those that the ledger calls open."""
    for i in range(0, len(held), 4):
        name, end_ms, entry, left_ms = held[i : i + 4]
        if entry is not None and entry.startswith(b"open:"):
            yield HeldMember(
                key=keys.parse_trajectory_id(name.decode()),
                writer=keys.decode_name(entry.decode().split(":", 2)[2]),
                lease_left_s=(int(end_ms) - now_ms) / 1_000,
                deadline_left_s=None if left_ms is None else int(left_ms) / 1_000,
            )
