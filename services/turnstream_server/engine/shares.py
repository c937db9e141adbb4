"""The share of one rank in the operations that run next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from turnstream.types import MiniBatch
from turnstream_server.operations.log import Run
from turnstream_server.trainer.operations import OperationLoss


class OperationShare(NamedTuple):
    """Rows that share the loss of a device pass.

    Attributes:
        mini_batch: rows of this rank, with their `operations` columns. All ranks have equally many
            shares; one without real rows has inert ones.
        loss: the loss of all of its rows.
    """

    mini_batch: MiniBatch
    loss: OperationLoss


ReadShares = Callable[[str, Run, frozenset[int]], Sequence[OperationShare]]
"""Takes the id of a model, training calls, and the numbers among them that are skipped.

Returns the shares of this rank, in the order of the passes."""


def one_pass_each(shares: Iterable[OperationShare]) -> Iterator[OperationShare]:
    """Yield the shares with one forward pass each, in their order."""
    for mini_batch, loss in shares:
        for rows in mini_batch.info.micro_batches:
            info = replace(mini_batch.info, micro_batches=(rows,))
            yield OperationShare(replace(mini_batch, info=info), loss)
