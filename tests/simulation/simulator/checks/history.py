"""The record of a run's processes, which the laws compare with the store."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnstream.batching.config import BatchingConfig
from turnstream.errors import TurnGapError
from turnstream.store.client import keys
from turnstream.types import RecoveryToken, TrajectoryKey
from turnstream_server.ledger.sessions.session_writes import TrainerSession

_NEVER = (
    "another content",
    "the trajectory is being written by",
    "the store refused the command",
)
"""Texts of errors that no caller may get: a foreign write, or a script that failed."""


@dataclass
class History:
    """Facts of one run.

    Attributes:
        sealed_turns: trajectory id -> checksums of its turns, and the turns that are left out.
        writers: trajectory id -> the processes that wrote to it, or asked to.
        rewarded: trajectory -> time and value of an acknowledged reward.
        groups: name, samples and needed members of groups that several generators write.
        trained: step -> manifest hash, of the surviving history; `ever_trained` of all histories.
        checkpoints: tokens of the surviving history, oldest first; `on_disk` has all of them.
        most_withdrawn: the newest step that was trained by a withdrawn plan.
        revised: acknowledged configs by number: first step, config.
        mixed: refusals that no caller may get.
    """

    sealed_turns: dict[str, set[tuple[tuple[int, ...], frozenset[int]]]] = field(
        default_factory=dict
    )
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
    most_withdrawn: int = 0
    releasable: int = 0
    newest_stepped: int = 0
    num_sessions: int = 0
    session: str = ""
    newest_version: int = 0
    revised: dict[int, tuple[int, BatchingConfig]] = field(default_factory=dict)
    mixed: list[str] = field(default_factory=list)

    def wrote(self, key: TrajectoryKey, process: str) -> None:
        """A process writes to a trajectory, or asks to."""
        self.writers.setdefault(keys.trajectory_id(key), set()).add(process)

    def started(
        self, name: str, session: TrainerSession, token: RecoveryToken | None, *, released: int
    ) -> None:
        """Start a session: later steps and checkpoints than its token are invalid."""
        self.session = name
        self.newest_stepped = session.next_step - 1
        self.trained = {
            step: own_hash
            for step, own_hash in self.planned.items()
            if step < session.next_step and (step, own_hash) in self.all_trained
        }
        kept = [each for each in self.checkpoints if each.step < session.next_step - 1]
        self.checkpoints = [*kept, *([token] if token is not None and token.step else [])]
        self.releasable = released

    def saved(self, token: RecoveryToken, *, is_newest: bool, retained: int) -> None:
        """Note a checkpoint on disk, which survives if its session is the newest."""
        self.on_disk.append(token)
        if is_newest:
            self.checkpoints.append(token)
            self.may_release(retained=retained)

    def may_release(self, *, retained: int) -> None:
        """Allow the release of steps before the retained checkpoints."""
        if len(self.checkpoints) >= retained:
            self.releasable = max(self.releasable, self.checkpoints[-retained].step)

    def withdrew(self, first: int) -> None:
        """The plans from a step on are void."""
        self.most_withdrawn = max(self.most_withdrawn, *self.ever_trained, 0)
        for known in (self.planned, self.trained, self.ever_trained):
            for step in [step for step in known if step >= first]:
                del known[step]

    def went_back(self, synced_s: float) -> None:
        """The store came back as it was at a time."""
        for trained in (self.trained, self.ever_trained):
            for step in [step for step, own in trained.items() if self.planned.get(step) != own]:
                del trained[step]
        for key, (posted_s, _) in self.rewarded.items():
            if posted_s > synced_s and key not in self.awaiting:
                self.awaiting.append(key)  # its poster may have died

    def refused(self, error: Exception) -> None:
        """Note an error that a caller got, if none may get it."""
        if isinstance(error, TurnGapError) or any(text in str(error) for text in _NEVER):
            self.mixed.append(str(error))
