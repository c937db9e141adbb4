"""Age of a token: how many steps it is older than the weights it will train.

A version is an integer name of weights. Age is counted in steps: the batch of step 7 trains the
weights made after step 6, so tokens of a version made after step 5 are one step old.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf

from turnstream.types import SealedTrajectory, VersionAnnounced


class VersionSteps:
    """The step after which the weights of each announced version were made.

    A version made after a fork's step, in the history before, ages from the fork.

    Attributes:
        steps: by version.
        lineage: lineage of the last announcement.
    """

    def __init__(self, steps: Mapping[int, int] | None = None, *, lineage: str = "") -> None:
        self.steps = dict(steps or {})
        self.lineage = lineage

    def announce(self, announced: VersionAnnounced) -> None:
        """Apply the next announcement.

        The first one of a lineage rolls back to its step, because older histories have no rollback
        events.
        """
        if announced.lineage != self.lineage:
            self.roll_back(announced.step)
            self.lineage = announced.lineage
        self.steps[announced.version] = announced.step

    def roll_back(self, step: int) -> None:
        """Age all versions made after this step from there."""
        self.steps = {version: min(made, step) for version, made in self.steps.items()}

    def older_than(self, max_age: int, *, train_step: int, among: Iterable[int]) -> frozenset[int]:
        """Return the given versions whose tokens are more than `max_age` steps old in this step.

        An unannounced version was made before those above it, so it is at least as old as the
        oldest of them. One above all announced versions may be new::

            announced   10 made after step 1, 20 after step 2
            in step 4   5, 10 and 15 are 2, 2 and 1 steps old; 25 may be new
        """
        return frozenset(
            version for version in among if train_step - 1 - self._made_by(version) > max_age
        )

    def _made_by(self, version: int) -> float:
        """Return the step by which a version was made; infinity above all announced ones."""
        if version in self.steps:
            return self.steps[version]
        return min([step for above, step in self.steps.items() if above > version], default=inf)


def tokens_of(trajectory: SealedTrajectory, versions: Collection[int]) -> list[int]:
    """Return how many trained tokens of every turn these versions sampled."""
    return [
        sum([count for version, count in own if version in versions])
        for own in trajectory.turn_versions
    ]


def is_wholly_of(trajectory: SealedTrajectory, versions: Collection[int]) -> bool:
    """Return whether one version sampled all its trained tokens, and is one of these."""
    return not trajectory.turn_versions and trajectory.oldest_version in versions


def version_span(
    trajectory: SealedTrajectory, *, without: Collection[int]
) -> tuple[int | None, int | None]:
    """Return the oldest and newest version of its trained tokens, except these versions."""
    left = {v for own in trajectory.turn_versions for v, _ in own if v is not None} - set(without)
    return min(left, default=None), max(left, default=None)
