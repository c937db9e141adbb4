"""What the processes of a life said and were told, by which the laws judge beside the store."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnstream.batching.config import BatchingConfig
from turnstream.batching.merge.plan import Manifest
from turnstream.errors import TurnGapError
from turnstream.store import keys
from turnstream.types import RecoveryToken, TrajectoryKey
from turnstream_server.bus.sessions import TrainerSession

_NEVER = (
    "another content",
    "the trajectory is being written by",
    "the store refused the command",
)
"""What no caller may be told: that another wrote what is its own, or that a script failed."""


@dataclass
class History:
    """Facts of one life.

    Attributes:
        said: trajectory id -> the CRCs of the turns of every seal that was tried.
        acknowledged: trajectories of which a writer was told that the run knows their seal.
        writers: trajectory id -> the processes that wrote to it, or asked to.
        lost: what publishers said that the store had lost, by trajectory id.
        awaiting: trajectories that were sealed without their reward, which nobody has posted.
        rewarded: trajectory -> when a reward was acknowledged, and which.
        trained: step -> manifest hash, of the history that survives.
        checkpoints: tokens of the history that survives, oldest first; what a trainer starts from.
        on_disk: all that were ever saved.
        groups: name, samples and needed members of those that several generators write.
        ever_trained: the same as `trained`, of all histories.
        planned: step -> manifest hash, as the store has it.
        all_trained: every step and manifest hash that was ever trained.
        most_withdrawn: the newest step that was trained by a plan that was withdrawn.
        releasable: the newest step that may be released.
        newest_said: the newest step that the present session has acknowledged, or tried to.
        intended: step -> plans that were checked, and maybe not written.
        revised: the configs whose storing was acknowledged, by number: first step, config.
        refusals: errors that callers were told, by type.
        mixed: refusals that no caller may see.
    """

    said: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    writers: dict[str, set[str]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    awaiting: list[TrajectoryKey] = field(default_factory=list)
    rewarded: dict[TrajectoryKey, tuple[float, float]] = field(default_factory=dict)
    groups: list[tuple[str, int, int]] = field(default_factory=list)
    trained: dict[int, str] = field(default_factory=dict)
    on_disk: list[RecoveryToken] = field(default_factory=list)
    ever_trained: dict[int, str] = field(default_factory=dict)
    planned: dict[int, str] = field(default_factory=dict)
    all_trained: set[tuple[int, str]] = field(default_factory=set)
    checkpoints: list[RecoveryToken] = field(default_factory=list)
    intended: dict[int, list[Manifest]] = field(default_factory=dict)
    most_withdrawn: int = 0
    releasable: int = 0
    newest_said: int = 0
    num_sessions: int = 0
    session: str = ""
    newest_version: int = 0
    revised: dict[int, tuple[int, BatchingConfig]] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    mixed: list[str] = field(default_factory=list)

    def wrote(self, key: TrajectoryKey, process: str) -> None:
        """A process writes to a trajectory, or asks to."""
        self.writers.setdefault(keys.trajectory_id(key), set()).add(process)

    def begun(
        self, name: str, session: TrainerSession, token: RecoveryToken | None, *, released: int
    ) -> None:
        """A session has begun: what was saved after its token is given up, and released no more."""
        self.session = name
        self.newest_said = session.next_step - 1
        kept = [each for each in self.checkpoints if each.step < session.next_step - 1]
        self.checkpoints = [*kept, *([token] if token is not None and token.step else [])]
        self.releasable = released

    def saved(self, token: RecoveryToken, *, is_present: bool, retained: int) -> None:
        """A checkpoint is on disk: one of the history that survives, if its session is present."""
        self.on_disk.append(token)
        if is_present:
            self.checkpoints.append(token)
            self.may_release(retained=retained)

    def may_release(self, *, retained: int) -> None:
        """What is before the checkpoints that are kept."""
        if len(self.checkpoints) >= retained:
            self.releasable = max(self.releasable, self.checkpoints[-retained].step)

    def withdrew(self, first: int) -> None:
        """The plans from a step on are void."""
        self.most_withdrawn = max(self.most_withdrawn, *self.ever_trained, 0)
        for known in (self.planned, self.trained, self.ever_trained, self.intended):
            for step in [step for step in known if step >= first]:
                del known[step]

    def went_back(self, synced_s: float) -> None:
        """The store came back as it was at a time."""
        self.intended.clear()
        for trained in (self.trained, self.ever_trained):
            for step in [step for step, own in trained.items() if self.planned.get(step) != own]:
                del trained[step]
        for key, (posted_s, _) in self.rewarded.items():
            if posted_s > synced_s and key not in self.awaiting:
                self.awaiting.append(key)  # whoever posted it may be gone

    def refused(self, error: Exception) -> None:
        """Count an error that a caller was told."""
        name = type(error).__name__
        self.refusals[name] = self.refusals.get(name, 0) + 1
        if isinstance(error, TurnGapError) or any(text in str(error) for text in _NEVER):
            self.mixed.append(str(error))
