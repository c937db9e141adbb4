"""The guards of the batching core, each with the change that takes it away."""

from mutations.layouts import LAYOUTS
from mutations.mutation import Mutation
from mutations.rows import ROWS
from mutations.scores import SCORES

__all__ = ["MUTATIONS", "Mutation"]

MUTATIONS = (*ROWS, *LAYOUTS, *SCORES)
