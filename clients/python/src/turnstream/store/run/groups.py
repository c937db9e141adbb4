"""Arguments of scripts about groups, and granted refills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.scripts import Command, Script
from turnstream.types import GroupOpened, Purpose, TrajectoryKey

OPEN_GROUP = Script("open_group", "turnstream.store.run")
_LIST_REFILLS = Script("list_refills", "turnstream.store.run")
_READ_GROUP = Script("read_group", "turnstream.store.run")


class Unfinished(NamedTuple):
    """Samples of a group that are not finished.

    Attributes:
        unopened: samples that no generator has opened, in order.
        begun: samples that a generator has opened and not ended, in order.
    """

    unopened: Sequence[int]
    begun: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """A granted retry of a sample.

    Attributes:
        key: the attempt.
        prompt_uid: the dataset's name of the prompt.
        num_samples: samples of its group.
        num_needed: members that decide its group.
    """

    key: TrajectoryKey
    prompt_uid: str
    num_samples: int
    num_needed: int

    @property
    def group(self) -> GroupOpened:
        """Group of the attempt, as it was opened."""
        return GroupOpened(
            group_id=self.key.group_id,
            prompt_uid=self.prompt_uid,
            num_samples=self.num_samples,
            num_needed=self.num_needed,
        )


def group_size(group: GroupOpened, *, is_again: bool = False) -> str:
    """Return the size of a group in the words of the script open_group.

    Args:
        group: as it is opened.
        is_again: its writer opened it before, and the store may have forgotten that.

    >>> group_size(GroupOpened(group_id="g", prompt_uid="", num_samples=6, num_needed=4))
    '6/4'
    >>> group_size(GroupOpened(group_id="g", prompt_uid="", num_samples=6, purpose=Purpose.EVAL))
    '6:eval'
    >>> group_size(GroupOpened(group_id="g", prompt_uid="", num_samples=6), is_again=True)
    '6+'
    """
    needed = "" if group.num_needed == group.num_samples else f"/{group.num_needed}"
    purpose = ":eval" if group.purpose is Purpose.EVAL else ""
    return f"{group.num_samples}{needed}{purpose}{'+' if is_again else ''}"


def read_group_command(run: str, group: GroupOpened) -> Command:
    """Return the call that reads how far the samples of a group are; nothing is sent."""
    names = keys.run_keys(run)
    where = (names.frontier, names.groups, names.ledger, names.over)
    return _READ_GROUP(where, keys.encode_name(group.group_id), group.num_samples)


def parse_unfinished(reply: Sequence[bytes], *, num_samples: int) -> Unfinished:
    """Return the unfinished samples of a group, from the reply of the script read_group.

    >>> parse_unfinished([b"new"], num_samples=2)
    Unfinished(unopened=[0, 1], begun=[])
    >>> parse_unfinished([b"open", b"sealed", b"open", b""], num_samples=3)
    Unfinished(unopened=[2], begun=[1])
    """
    state, *samples = [word.decode() for word in reply]
    if state == "new":
        return Unfinished([*range(num_samples)], [])
    return Unfinished(
        [sample for sample, word in enumerate(samples) if word == ""],
        [sample for sample, word in enumerate(samples) if word == "open"],
    )


def open_refill_command(run: str, writer: str, refill: Refill) -> Command:
    """Return the call by which a writer opens a refill; nothing is sent."""
    group = refill.group
    return OPEN_GROUP(
        keys.run_keys(run).of_open_group,
        keys.encode_name(group.group_id),
        group_size(group),
        writer,
        encode_event(group),
        keys.trajectory_id(refill.key),
    )


def list_refills_command(run: str, *, max_count: int) -> Command:
    """Return the call that reads the oldest unopened refills; nothing is sent."""
    names = keys.run_keys(run)
    where = (names.groups, names.members, names.refills, names.wake, names.frontier)
    return _LIST_REFILLS(where, max_count)


def parse_refills(reply: Sequence[Any]) -> tuple[str, list[Refill]]:
    """Return the id of the wake stream after which more refills may come, and the refills."""
    wake_id, *flat = [word.decode() for word in reply]
    refills = [
        Refill(
            key=keys.parse_trajectory_id(flat[i]),
            prompt_uid=flat[i + 3],
            num_samples=int(flat[i + 1]),
            num_needed=int(flat[i + 2]),
        )
        for i in range(0, len(flat), 4)
    ]
    return wake_id, refills
