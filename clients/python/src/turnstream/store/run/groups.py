"""Arguments of scripts about groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from turnstream.store.client import keys
from turnstream.store.client.scripts import Command, Script
from turnstream.types import GroupOpened, Purpose

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
