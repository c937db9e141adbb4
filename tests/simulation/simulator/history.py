"""What the processes of a life said and were told, by which the laws judge beside the store."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnstream.batching.plan import Manifest
from turnstream.errors import TurnGapError
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
        awaiting: trajectories that were sealed without their reward, which nobody has posted.
        trained: step -> manifest hash, of the history that survives.
        checkpoints: tokens of the history that survives, oldest first; what a trainer starts from.
        on_disk: all that were ever saved.
        groups: name, samples and needed members of those that several generators write.
        ever_trained: the same as `trained`, of all histories.
        releasable: the newest step that may be released.
        intended: step -> plans that were checked, and maybe not written.
        refusals: errors that callers were told, by type.
        mixed: refusals that no caller may see.
    """

    said: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    awaiting: list[TrajectoryKey] = field(default_factory=list)
    groups: list[tuple[str, int, int]] = field(default_factory=list)
    trained: dict[int, str] = field(default_factory=dict)
    on_disk: list[RecoveryToken] = field(default_factory=list)
    ever_trained: dict[int, str] = field(default_factory=dict)
    checkpoints: list[RecoveryToken] = field(default_factory=list)
    intended: dict[int, list[Manifest]] = field(default_factory=dict)
    releasable: int = 0
    num_sessions: int = 0
    session_epoch: int = 0
    newest_version: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    mixed: list[str] = field(default_factory=list)

    def begun(self, session: TrainerSession, token: RecoveryToken | None) -> None:
        """A session has begun: what was saved after its token is given up."""
        self.session_epoch = session.session_epoch
        kept = [each for each in self.checkpoints if each.step < session.next_step - 1]
        self.checkpoints = [*kept, *([token] if token is not None and token.step else [])]

    def saved(self, token: RecoveryToken, *, retained: int) -> None:
        """A checkpoint is on disk."""
        self.checkpoints.append(token)
        self.on_disk.append(token)
        if len(self.checkpoints) >= retained:
            self.releasable = max(self.releasable, self.checkpoints[-retained].step)

    def refused(self, error: Exception) -> None:
        """Count an error that a caller was told."""
        name = type(error).__name__
        self.refusals[name] = self.refusals.get(name, 0) + 1
        if isinstance(error, TurnGapError) or any(text in str(error) for text in _NEVER):
            self.mixed.append(str(error))
