"""The values that everything else passes around. No I/O, no clock, numpy only.

Token ids are int32, log-probabilities float32 in nats, masks uint8 with 1 for "trained".
"""

from turnstream.types.events import (
    BatchDue,
    DeadlineFired,
    Event,
    GroupOpened,
    RefillGranted,
    RewardPosted,
    RunClosed,
    TrajectoryAbandoned,
    TrajectoryDied,
    VersionAnnounced,
)
from turnstream.types.extras import DeclaredColumn, Extent, ExtraPiece, SequenceColumn
from turnstream.types.figures import Figures, MetricFigures, TagFigures, ValueFigures
from turnstream.types.rows import (
    Denominators,
    ExtraColumn,
    MiniBatch,
    MiniBatchInfo,
    OperationColumns,
    Ragged,
    RecoveryToken,
    Rows,
    Sequence,
)
from turnstream.types.turns import (
    NO_PARENT,
    Group,
    SealedTrajectory,
    Status,
    StoredTurn,
    Trajectory,
    TrajectoryKey,
    TrajectoryState,
    Turn,
    TurnShape,
    VersionRun,
)

__all__ = [
    "NO_PARENT",
    "BatchDue",
    "DeadlineFired",
    "DeclaredColumn",
    "Denominators",
    "Event",
    "Extent",
    "ExtraColumn",
    "ExtraPiece",
    "Figures",
    "Group",
    "GroupOpened",
    "MetricFigures",
    "MiniBatch",
    "MiniBatchInfo",
    "OperationColumns",
    "Ragged",
    "RecoveryToken",
    "RefillGranted",
    "RewardPosted",
    "Rows",
    "RunClosed",
    "SealedTrajectory",
    "Sequence",
    "SequenceColumn",
    "Status",
    "StoredTurn",
    "TagFigures",
    "Trajectory",
    "TrajectoryAbandoned",
    "TrajectoryDied",
    "TrajectoryKey",
    "TrajectoryState",
    "Turn",
    "TurnShape",
    "ValueFigures",
    "VersionAnnounced",
    "VersionRun",
]
