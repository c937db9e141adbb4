"""Arguments of scripts about groups and their open trajectories: sizes, leases and reserved bytes.

Leases are renewed by heartbeats, and adopted after they ended. Bytes are reserved when a group is
opened, and topped up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import redis.asyncio

from turnstream.errors import RecordError
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.store.client.run_ids import find_run_async
from turnstream.store.client.scripts import Argument, Command, Script, run_command_async
from turnstream.types import GroupOpened, Purpose, SealedTrajectory, TrajectoryKey

OPEN_GROUP = Script("open_group", "turnstream.store.run")
_READ_GROUP = Script("read_group", "turnstream.store.run")


ATTEMPT_LIMIT: Final = 1000
"""Attempts of one sample: the scripts that decide a group look at each of them."""

MOST_GROUP_BYTES: Final = 524_288
"""Attempts of all samples of a group, times the bytes of its name: see group_members.lua."""

LEAST_NAME_BYTES: Final = 128
"""Bytes that a shorter name counts as."""


class Unfinished(NamedTuple):
    """Samples of a group that are not finished.

    Attributes:
        unopened: samples that no generator has opened, in order.
        open: samples that a generator has opened and not ended, in order.
        again: number and state of the last attempt of open samples that were tried again.
    """

    unopened: Sequence[int]
    open: Sequence[int]
    again: Mapping[int, tuple[int, str]]


def group_size(
    group: GroupOpened,
    *,
    is_again: bool = False,
    is_exclusive: bool = False,
    prompt_number: int = 0,
) -> str:
    """Return the size of a group in the words of the script open_group.

    Args:
        group: as it is opened.
        is_again: its writer opened it before, and the store may have forgotten that.
        is_exclusive: a sample that the writer has opened before is refused.
        prompt_number: number of its prompt; 0 without one.

    >>> group_size(GroupOpened(group_id="g", prompt_uid="", num_samples=6, num_needed=4))
    '6/4'
    >>> group_size(GroupOpened(group_id="g", prompt_uid="", num_samples=6, purpose=Purpose.EVAL))
    '6:eval'
    >>> group = GroupOpened(group_id="g", prompt_uid="", num_samples=6)
    >>> group_size(group, is_again=True, prompt_number=12)
    '6+#12'
    """
    needed = "" if group.num_needed == group.num_samples else f"/{group.num_needed}"
    purpose = ":eval" if group.purpose is Purpose.EVAL else ""
    number = f"#{prompt_number}" if prompt_number else ""
    flags = f"{'+' if is_again else ''}{'!' if is_exclusive else ''}"
    return f"{group.num_samples}{needed}{purpose}{flags}{number}"


def most_samples(group_id: str) -> int:
    """Return the number of samples that a group of this name may have.

    The same rule is in group_members.lua, which limits samples times attempts.

    >>> most_samples("g"), most_samples("g" * 500)
    (4096, 1048)
    """
    return MOST_GROUP_BYTES // max(LEAST_NAME_BYTES, len(keys.encode_name(group_id)))


def most_attempts(group: GroupOpened) -> int:
    """Return the number of attempts that a sample of a group may have without a granted refill.

    >>> most_attempts(GroupOpened(group_id="g", prompt_uid="", num_samples=8))
    512
    """
    return max(1, min(ATTEMPT_LIMIT, most_samples(group.group_id) // group.num_samples))


def read_group_command(run: str, group_id: str, num_samples: int) -> Command:
    """Return the call that reads how far the samples of a group are; nothing is sent."""
    names = keys.run_keys(run)
    where = (names.frontier, names.groups, names.ledger, names.finished_groups)
    return _READ_GROUP(where, keys.encode_name(group_id), num_samples)


def parse_unfinished(reply: Sequence[bytes], *, num_samples: int) -> Unfinished:
    """Return the unfinished samples of a group, from the reply of the script read_group.

    >>> parse_unfinished([b"new"], num_samples=2)
    Unfinished(unopened=[0, 1], open=[], again={})
    >>> parse_unfinished([b"open", b"sealed", b"open", b"", b"open:2:sealed"], num_samples=4)
    Unfinished(unopened=[2], open=[1, 3], again={3: (2, 'sealed')})
    """
    state, *samples = [word.decode() for word in reply]
    if state == "new":
        return Unfinished([*range(num_samples)], [], {})
    parts = [word.split(":") for word in samples]
    return Unfinished(
        [sample for sample, (word, *_) in enumerate(parts) if word == ""],
        [sample for sample, (word, *_) in enumerate(parts) if word == "open"],
        {sample: (int(part[1]), part[2]) for sample, part in enumerate(parts) if len(part) > 1},
    )


FIRST_BYTES: Final = 12_288
"""Bytes of records in every reservation that group_admission.lua makes."""

_LEAST_BLOCK: Final = 16_384
_LARGEST_BLOCK: Final = 1 << 20

RESERVE = Script("reserve", "turnstream.store.run")


def reserve_command(run: str, wanted: Sequence[tuple[str, int, int]], *, writer: str) -> Command:
    """Return the call that tops up reservations: (id, lease epoch, bytes) of each."""
    names = keys.run_keys(run)
    arguments: list[Argument] = []
    for trajectory_id, epoch, num_bytes in wanted:
        arguments += (trajectory_id, f"{epoch}:{writer}", num_bytes)
    return RESERVE((names.ledger, names.payload_bytes, names.budget), *arguments)


def with_block(num_bytes: int) -> int:
    """Return the reservation for a growing trajectory: as much again, within bounds.

    >>> with_block(20_000), with_block(1_000), with_block(10 << 20) >> 20
    (40000, 17384, 11)
    """
    return num_bytes + min(max(num_bytes, _LEAST_BLOCK), _LARGEST_BLOCK)


def settled_lease(epoch: int, writer: str, *, awaits_reward: bool, num_bytes: int | None) -> str:
    """Return lease and size of a sealed trajectory for the script post_sealed.

    >>> settled_lease(2, "gpu7", awaits_reward=True, num_bytes=500)
    '2:awaits/500:gpu7'
    >>> settled_lease(2, "gpu7", awaits_reward=False, num_bytes=None)
    '2::gpu7'
    """
    size = "" if num_bytes is None else f"/{num_bytes}"
    words = f"{epoch}:{'awaits' if awaits_reward else ''}{size}"
    return f"{words}:{writer}" if writer else words


def lease_of_seal(epoch: int, writer: str, seal: bytes) -> str:
    """Return the same for a stored seal, whose writer is gone."""
    awaits_reward, num_bytes = facts_of_seal(seal)
    return settled_lease(epoch, writer, awaits_reward=awaits_reward, num_bytes=num_bytes)


def facts_of_seal(seal: bytes) -> tuple[bool, int | None]:
    """Return whether a stored seal awaits a reward, and the bytes of all records.

    An unreadable seal has no size. It is posted as it is, so that the planner rejects it.
    """
    try:
        event = decode_event(seal)
    except RecordError:
        event = None
    if not isinstance(event, SealedTrajectory):
        return False, None
    return event.awaits_reward, event.num_payload_bytes + len(seal)


_HEARTBEAT = Script("heartbeat", "turnstream.store.run")
_ADOPT = Script("adopt", "turnstream.store.run")
_LIST_LAPSED = Script("list_lapsed", "turnstream.store.run")

MAX_HEARTBEATS = 256
"""Trajectories of one heartbeat: the store does nothing else for the quarter of a millisecond."""

MAX_LAPSED = 256
"""Trajectories of one list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LapsedTrajectory:
    """An open trajectory whose lease has ended.

    Attributes:
        writer: its owner until another generator adopts it.
        epoch: its lease epoch.
    """

    key: TrajectoryKey
    writer: str
    epoch: int


async def list_lapsed_async(
    client: redis.asyncio.Redis,
    run: str,
    *,
    until_ms: int | None = None,
    max_count: int = MAX_LAPSED,
) -> list[LapsedTrajectory]:
    """Return the trajectories that may be adopted, the longest lapsed first."""
    run = await find_run_async(client, run)
    command = list_lapsed_command(run, until_ms=until_ms, max_count=max_count)
    return parse_lapsed(await run_command_async(client, command))


def heartbeat_command(run: str, held: Sequence[tuple[str, int]], *, writer: str) -> Command:
    """Return the call that renews leases, at most MAX_HEARTBEATS: (id, lease epoch) of each."""
    names = keys.run_keys(run)
    arguments: list[Argument] = []
    for trajectory_id, epoch in held:
        arguments += (trajectory_id, f"{epoch}:{writer}")
    return _HEARTBEAT((names.ledger, names.leases, names.config), *arguments)


def adopt_command(run: str, trajectory_id: str, *, writer: str) -> Command:
    """Return the call by which a writer adopts a lapsed trajectory; nothing is sent."""
    names = keys.run_keys(run)
    where = (names.ledger, names.leases, names.config, names.groups)
    return _ADOPT(where, trajectory_id, writer)


def list_lapsed_command(
    run: str, *, until_ms: int | None = None, max_count: int = MAX_LAPSED
) -> Command:
    """Return the call that lists lapsed trajectories; nothing is sent."""
    names = keys.run_keys(run)
    where = (names.ledger, names.leases, names.config)
    return _LIST_LAPSED(where, "" if until_ms is None else until_ms, max_count)


def parse_lapsed(reply: Sequence[bytes]) -> list[LapsedTrajectory]:
    """Return the trajectories of the reply of the script list_lapsed."""
    return [
        LapsedTrajectory(
            key=keys.parse_trajectory_id(trajectory_id.decode()),
            writer=keys.decode_name(entry.decode().split(":", 2)[2]),
            epoch=int(entry.split(b":", 2)[1]),
        )
        for trajectory_id, entry in zip(reply[::2], reply[1::2], strict=True)
    ]
