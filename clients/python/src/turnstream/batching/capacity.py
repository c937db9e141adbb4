"""How many groups may start now: the rule by which generators are held back.

Pacing instead of discarding: a group that would be too old when it is trained is not begun. The
rule is that of AReaL (Fu et al., 2025, section 4.1) with one correction. There, what was filtered
or failed stays accepted for ever, so that a run that filters many groups starves its trainer; here
it is taken out. `store/lua/open_group.lua` is the same rule over the numbers of a run;
`store/credits.py` says what it gives.
"""

from __future__ import annotations


def capacity(
    *,
    version_step: int,
    batch_groups: int,
    max_staleness: int,
    num_accepted: int,
    num_running: int,
    max_concurrent: int,
    num_revised: int = 0,
) -> int:
    """Groups that may start now without any of them growing staler than allowed.

    >>> capacity(version_step=3, batch_groups=8, max_staleness=2, num_accepted=27, num_running=5,
    ...          max_concurrent=100)
    16

    A trainer that has used up every accepted group finds room for a batch and `max_staleness` more,
    however many groups were dropped on the way: so a run goes on at any pass rate above 0.

    Args:
        version_step: steps trained so far.
        batch_groups: groups of one step.
        max_staleness: steps that a group may lag.
        num_accepted: groups finished that were trained or can still be: filtered, expired, dropped
            and abandoned ones do not count.
        num_running: groups under way.
        max_concurrent: groups that may be under way at once; 0 means no limit.
        num_revised: see most_live_groups.
    """
    allowed = most_live_groups(
        version_step,
        batch_groups=batch_groups,
        max_staleness=max_staleness,
        num_revised=num_revised,
    )
    room = allowed - (num_accepted + num_running)
    if max_concurrent:
        room = min(room, max_concurrent - num_running)
    return max(0, room)


def most_live_groups(
    version_step: int, *, batch_groups: int, max_staleness: int, num_revised: int = 0
) -> int:
    """Groups that may be accepted or under way after so many steps.

    >>> most_live_groups(3, batch_groups=8, max_staleness=2)
    48

    The rule counts every group since the first step, so that the steps before a revision of
    `batch_groups` must count as what they were. Where 2 steps of 4 groups came before:

    >>> most_live_groups(3, batch_groups=8, max_staleness=2, num_revised=2 * (4 - 8))
    40

    So must a short step of a run that was closed and reopened. Where the third step had 1 group:

    >>> most_live_groups(3, batch_groups=8, max_staleness=2, num_revised=1 - 8)
    41

    Args:
        version_step: steps trained so far.
        batch_groups: groups of one step now.
        max_staleness: steps that a group may lag.
        num_revised: groups that planned steps, short ones and those before revisions, had above
            `batch_groups`; below 0 where they had fewer.
    """
    return (max_staleness + version_step + 1) * batch_groups + num_revised
