"""Names of trajectories as people write them, and as the messages of scripts contain them."""

from __future__ import annotations

import re

from turnstream.types import TrajectoryKey
from turnstream.types.names import decode_name, encode_name

_NAME_IN_TEXT = re.compile(
    r"(?:(?<=\bgroup )|(?<=\bobserver )|(?<=\bby )|(?<=\bof )|(?<=\d:))[A-Za-z0-9._%-]+"
    r"|[A-Za-z0-9._%-]+(?=/\d+/\d+\b)"
)


def keys_named(text: str) -> tuple[TrajectoryKey, ...]:
    """The trajectories that somebody may mean by a name, as people read it or as an id.

    A group may have a name that looks encoded: as it is read comes first.

    >>> [key.group_id for key in keys_named("a/b#1/3/0")]
    ['a/b#1']
    >>> [key.group_id for key in keys_named("a%2Fb%231/3/0")]
    ['a%2Fb%231', 'a/b#1']
    """
    group, sample, attempt = text.rsplit("/", 2)
    encode_name(group)  # refuses what no group can be called
    names = dict.fromkeys((group, decode_name(group)))
    return tuple(TrajectoryKey(name, int(sample), int(attempt)) for name in names)


def with_readable_names(message: str) -> str:
    """Return a message of a script with decoded names; scripts know only encoded ones.

    Trajectories are recognised by their form; groups, observers and writers by the word before
    them. The rest of a message does not change: a reason may contain a percent sign.

    >>> with_readable_names("group a%2Fb of a%2Fb/0/0 is open:1:host%3A7, not at 50%25")
    'group a/b of a/b/0/0 is open:1:host:7, not at 50%25'
    """
    return _NAME_IN_TEXT.sub(lambda found: decode_name(found[0]), message)
