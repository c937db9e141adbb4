"""Age of a token: how many steps it is older than the weights it will train.

A version is an integer name of weights; the run maps it to the step after which they were made.
Age is counted in steps, not in versions: two versions of the same step are of the same age.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from turnstream.errors import BatchingError
from turnstream.types import SealedTrajectory, VersionAnnounced


def age(version: int, *, train_step: int, step_of_version: Mapping[int, int]) -> int:
    """Return the steps between the batch that trains and the weights that sampled.

    The batch of step 7 trains the weights made after step 6. Version 4 was made after step 5, so
    its tokens are one step old:

    >>> age(4, train_step=7, step_of_version={4: 5})
    1
    """
    if version not in step_of_version:
        raise BatchingError(f"version {version} was never announced")
    return train_step - 1 - step_of_version[version]


class VersionSteps:
    """The step after which the weights of each announced version were made.

    A version made after the step where a later history began is of a dead lineage. The weights that
    train are those of the fork, and so its tokens age from there.

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
        """Another history begins behind this step."""
        self.steps = {version: min(made, step) for version, made in self.steps.items()}

    def older_than(self, max_age: int, *, train_step: int, among: Iterable[int]) -> frozenset[int]:
        """Return the given versions whose tokens are more than `max_age` steps old in this step.

        An unannounced version was made before those above it, so it is at least as old as the
        oldest of them. One above all announced versions may be new::

            announced   10 made after step 1, 20 after step 2
            in step 4   5, 10 and 15 are 2, 2 and 1 steps old; 25 may be new
        """
        made_by = self._made_by(set(among))
        return frozenset(
            version
            for version in made_by
            if age(version, train_step=train_step, step_of_version=made_by) > max_age
        )

    def _made_by(self, versions: Collection[int]) -> dict[int, int]:
        """By which step each of these was made; without those above all that were announced."""
        made_by: dict[int, int] = {}
        oldest_above: int | None = None
        announced = sorted(self.steps)
        for version in sorted(versions, reverse=True):
            while announced and announced[-1] > version:
                step = self.steps[announced.pop()]
                oldest_above = step if oldest_above is None else min(oldest_above, step)
            step = self.steps.get(version, oldest_above)
            if step is not None:
                made_by[version] = step
        return made_by


def tokens_of(trajectory: SealedTrajectory, versions: Collection[int]) -> list[int]:
    """How many trained tokens of every turn these versions sampled, by its `turn_versions`."""
    return [
        sum([count for version, count in own if version in versions])
        for own in trajectory.turn_versions
    ]


def is_wholly_of(trajectory: SealedTrajectory, versions: Collection[int]) -> bool:
    """Whether all its trained tokens have to be taken for those of these versions.

    So they are where one version sampled them, and where a seal of an older release names the
    oldest version and not what it sampled.
    """
    return not trajectory.turn_versions and trajectory.oldest_version in versions


def version_span(
    trajectory: SealedTrajectory, *, without: Collection[int]
) -> tuple[int | None, int | None]:
    """The oldest and the newest version of its trained tokens, these versions left out."""
    left = {v for own in trajectory.turn_versions for v, _ in own if v is not None} - set(without)
    return min(left, default=None), max(left, default=None)
