"""Progress of a rollout, as lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from turnstream_server.rollout.outcomes import End


@dataclass(slots=True)
class Progress:
    """Counts of one rollout since its start.

    Attributes:
        num_tasks: tasks that were taken and have ended.
        num_working: tasks in work.
        num_agents: agents that run.
        num_sealed: samples with a seal, those with an error too.
        rewards: sum and number of the rewards of samples without an error.
        errors: samples with an error, by its kind.
        num_lost: samples that had ended otherwise, such as by a closed run, or were refused.
        waits: why no task comes; "" while they come.
    """

    num_tasks: int = 0
    num_working: int = 0
    num_agents: int = 0
    num_sealed: int = 0
    rewards: tuple[float, int] = (0.0, 0)
    errors: Counter[str] = field(default_factory=Counter[str])
    num_lost: int = 0
    waits: str = ""

    def count(self, end: End) -> None:
        """Count a sealed sample."""
        self.num_sealed += 1
        if end.reason:
            self.errors[end.reason.partition(":")[0]] += 1
        elif end.reward is not None:
            total, number = self.rewards
            self.rewards = total + end.reward, number + 1

    @property
    def num_errors(self) -> int:
        """Return the number of samples with an error."""
        return self.errors.total()

    def line(self, elapsed_s: float, prompts: Mapping[str, int] | None, *, waits: str = "") -> str:
        """Return one line; `prompts` are the numbers of all prompts of the run by state.

        >>> Progress(num_sealed=3, rewards=(1.5, 3), num_agents=2).line(
        ...     70, {"added": 6, "trained": 2, "filtered": 1})
        '1:10  tasks 3 of 6 done, 0 in work  agents 2  sealed 3  reward 0.5  errors 0'
        """
        parts = [
            f"{_clock(elapsed_s)}  tasks {self._done(prompts)} done, {self.num_working} in work",
            f"agents {self.num_agents}",
            *self._results(),
            f"errors {self.num_errors:,}",
        ]
        return "  ".join([*parts, *([f"waits: {waits}"] if waits else [])])

    def summary(self, elapsed_s: float, prompts: Mapping[str, int] | None) -> str:
        """Return the lines for the end."""
        parts = [f"tasks {self._done(prompts)} done", *self._results()]
        parts.append(f"errors {self.num_errors:,}")
        if self.num_lost:
            parts.append(f"lost {self.num_lost:,}")
        lines = [f"{_clock(elapsed_s)}  {'  '.join(parts)}"]
        lines += [f"  {number:,} x {kind}" for kind, number in self.errors.most_common()]
        return "\n".join(lines)

    def _done(self, prompts: Mapping[str, int] | None) -> str:
        if prompts is None:
            return f"{self.num_tasks:,}"
        return f"{prompts['trained'] + prompts['filtered']:,} of {prompts['added']:,}"

    def _results(self) -> list[str]:
        total, number = self.rewards
        mean = [f"reward {total / number:.4g}"] if number else []
        return [f"sealed {self.num_sealed:,}", *mean]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
