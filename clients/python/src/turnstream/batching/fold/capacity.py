"""The number of groups that may start now: the rule that paces generators.

The rule is that of AReaL (Fu et al., 2025, section 4.1), but filtered and failed groups are
subtracted again: a run that filters many groups would starve its trainer.
A group is admitted once generators can have the weights that it needs: after the announcement of
a step, where a trainer announces. `store/run/lua/open_group.lua` is the same rule over the numbers
of a run.
"""

from __future__ import annotations


def capacity(most_live: int, *, num_decided: int, num_open: int, max_open: int) -> int:
    """Return how many groups may start now without any of them growing staler than allowed.

    `most_live` is the bound of `most_live_groups`. `num_decided` counts finished groups that were
    trained or can still be. `max_open` bounds the groups in flight; 0 means no limit.

    >>> capacity(48, num_decided=27, num_open=5, max_open=100)
    16
    """
    num_groups = most_live - num_decided - num_open
    if max_open:
        num_groups = min(num_groups, max_open - num_open)
    return max(0, num_groups)


def admitting_step(stepped: int, announced: int | None, *, max_staleness: int) -> int:
    """Return the step whose weights generators have: the one that capacity is computed from.

    `announced` is the step of the newest announced weights, None where the trainer session has
    announced none. Then the newest trained step counts, so that such a run does not stall. Nor does
    one whose trainer skips announcements: the groups of the step that it waits for are admitted.
    Only with `max_staleness` 0 every step needs its announcement.

    >>> admitting_step(5, 4, max_staleness=1), admitting_step(5, 5, max_staleness=1)
    (4, 5)
    >>> admitting_step(5, None, max_staleness=1), admitting_step(5, 1, max_staleness=2)
    (5, 3)
    >>> admitting_step(5, 4, max_staleness=0)
    4
    """
    if announced is None:
        return stepped
    return min(stepped, max(announced, stepped - max(1, max_staleness)))


def most_live_groups(
    version_step: int, *, batch_groups: int, max_staleness: int, num_revised: int = 0
) -> int:
    """Return how many groups may be accepted or under way after so many trained steps.

    `version_step` is the result of `admitting_step`.

    >>> most_live_groups(3, batch_groups=8, max_staleness=2)
    48

    The rule counts all groups since the first step, so `num_revised` corrects steps of another
    size: the groups that planned steps had above `batch_groups`, below 0 where they had fewer. Here
    2 steps of 4 groups came before a revision, or the third step was short, with 1 group:

    >>> most_live_groups(3, batch_groups=8, max_staleness=2, num_revised=2 * (4 - 8))
    40
    >>> most_live_groups(3, batch_groups=8, max_staleness=2, num_revised=1 - 8)
    41
    """
    return (max_staleness + version_step + 1) * batch_groups + num_revised
