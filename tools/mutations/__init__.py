"""The guards of the batching core and of the losses, each with the change that takes it away."""

from mutations.columns import COLUMNS
from mutations.combinations import COMBINATIONS
from mutations.corrections import CORRECTIONS
from mutations.declared import DECLARED
from mutations.estimators import ESTIMATORS
from mutations.evaluations import EVALUATIONS
from mutations.kept import KEPT
from mutations.layouts import LAYOUTS
from mutations.losses import LOSSES
from mutations.merging import MERGING
from mutations.mutation import Mutation
from mutations.policy_losses import POLICY_LOSSES
from mutations.readiness import READINESS
from mutations.results import RESULTS
from mutations.rows import ROWS
from mutations.scores import SCORES
from mutations.settings import SETTINGS
from mutations.shapes import SHAPES
from mutations.sizes import SIZES
from mutations.turns import TURNS
from mutations.withdrawing import WITHDRAWING

__all__ = ["MUTATIONS", "Mutation"]

MUTATIONS = (
    *MERGING,
    *READINESS,
    *WITHDRAWING,
    *ROWS,
    *COLUMNS,
    *LAYOUTS,
    *SHAPES,
    *SIZES,
    *SCORES,
    *TURNS,
    *KEPT,
    *ESTIMATORS,
    *SETTINGS,
    *COMBINATIONS,
    *DECLARED,
    *EVALUATIONS,
    *LOSSES,
    *CORRECTIONS,
    *POLICY_LOSSES,
    *RESULTS,
)
