"""The models of a worker on one rank, and calls that all ranks make together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from turnstream.errors import TurnstreamError
from turnstream.worker.operation_pulls import PulledOperations
from turnstream_server.engine.hosted_base import HostedBase, LoadedModel, write
from turnstream_server.engine.run_streams import (
    OpenStream,
    RunReport,
    RunStreams,
    check_fits,
    train_mini_batch,
)
from turnstream_server.models.folders import name_base, new_folder
from turnstream_server.operations.age import encrypt_folder
from turnstream_server.operations.contents import ForwardBackwardRun
from turnstream_server.operations.log import Run
from turnstream_server.operations.models import ModelRecord
from turnstream_server.trainer.metrics import StepReport
from turnstream_server.trainer.passes import OperationLoss, Turns
from turnstream_server.trainer.ranks import ONE_RANK, Ranks
from turnstream_server.trainer.settings import AdamSettings

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_Value = TypeVar("_Value")


ReadShares = Callable[[str, Run, frozenset[int]], Sequence[PulledOperations]]
"""Takes the id of a model, training calls, and the numbers among them that are skipped.

Returns the shares of this rank, in the order of the passes. All ranks have equally many."""


class RankError(Exception):
    """An error of a rank; its text names the type of the error."""


class DatumOutput(NamedTuple):
    """Results of one datum.

    Attributes:
        loss: sum over its positions.
        logprobs: float32, in the shape of its targets.
    """

    loss: float
    logprobs: NDArray[np.float32]


Outputs = dict[tuple[str, int], DatumOutput]
"""Results by request id and index of the datum."""


class Host(RunStreams):
    """The models of a worker on one rank. Without `open_stream` it refuses all runs."""

    def __init__(
        self,
        bases: Mapping[str, HostedBase],
        *,
        read_shares: ReadShares,
        open_stream: OpenStream | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        super().__init__(open_stream)
        self._bases = bases
        self._read_shares = read_shares
        self._ranks = ranks
        self._models: dict[str, LoadedModel] = {}
        self._shares: dict[str, Sequence[PulledOperations]] = {}
        self._begun: dict[str, Turns[Any]] = {}
        """Training calls that have passes left, by the id of their model."""

    def make(self, record: ModelRecord) -> None:
        """Make a model from its base model; BatchingError if the base model has no such models."""
        self.unload(record)
        self._models[record.model_id] = self._bases[record.base_model].make(record)

    def load(self, record: ModelRecord, folder: Path, *, optimizer: bool) -> None:
        """Load the weights of a folder, and the moments if asked; drop gradients.

        After a BatchingError the model is unchanged.
        """
        into = self._models.get(record.model_id)
        base = self._bases[record.base_model]
        loaded = base.load(record, folder, optimizer=optimizer, into=into)
        self._models[record.model_id] = loaded

    def unload(self, record: ModelRecord) -> None:
        """Free the weights of a model, if it is loaded, and close its runs."""
        self._shares.pop(record.model_id, None)
        self._begun.pop(record.model_id, None)
        self.close_runs(record.model_id)
        loaded = self._models.pop(record.model_id, None)
        if loaded is not None:
            self._bases[record.base_model].release(loaded)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def read(self, model_id: str, run: Run, skipped: frozenset[int]) -> None:
        """Read the rows of training calls for `train`; those of an earlier call are dropped."""
        self._begun.pop(model_id, None)  # it has failed on another rank
        self._shares[model_id] = self._read_shares(model_id, run, skipped)

    def train(self, model_id: str, *, adds_gradient: bool) -> Outputs | None:
        """Run the next forward pass over the rows of `read`; return all results after the last.

        All ranks have equally many passes.
        """
        return self._next_turn(model_id, lambda: self._train(model_id, adds_gradient=adds_gradient))

    def _next_turn(self, model_id: str, begin: Callable[[], Turns[_Value]]) -> _Value | None:
        """Begin work of a model, or continue it; return its result at its end."""
        turns = self._begun.pop(model_id, None) or begin()
        try:
            next(turns)
        except StopIteration as end:
            return end.value
        self._begun[model_id] = turns
        return None

    def _train(self, model_id: str, *, adds_gradient: bool) -> Turns[Outputs]:
        engine = self._models[model_id].engine
        run = engine.forward_backward_operations if adds_gradient else engine.forward_operations
        outputs: Outputs = {}
        passes = [
            (share, own)
            for share in self._shares.pop(model_id)
            for own in share.mini_batch.info.micro_batches
        ]
        for place, (share, own) in enumerate(passes):
            if place:
                yield
            rows, loss = (
                share.mini_batch.rows,
                OperationLoss(name=share.loss, settings=share.settings),
            )
            info = replace(share.mini_batch.info, micro_batches=(own,))
            report = run(replace(share.mini_batch, info=info), loss=loss)
            assert rows.operations is not None
            for row in own:
                row_id = int(rows.row_id[row])
                if row_id in report.losses:  # an inert row has none
                    name = rows.operations.request_id[row], int(rows.operations.datum_index[row])
                    outputs[name] = DatumOutput(report.losses[row_id], report.logprobs[row_id])
        return outputs

    def has_finite_gradient(self, model_id: str) -> bool:
        """Return whether the gradients of this rank since the last step are finite."""
        return self._models[model_id].engine.has_finite_gradient()

    def pull_run(self, record: ModelRecord, run: str, *, timeout_s: float) -> None:
        """Pull the next mini-batch of a run; BatchingError if it does not fit the base model."""
        base = self._bases[record.base_model]
        self._begun.pop(record.model_id, None)  # it has failed on another rank
        mini_batch = self._pull(record.model_id, run, timeout_s=timeout_s)
        check_fits(mini_batch, context_length=base.context_length, vocab_size=base.vocab_size)

    def train_run(self, model_id: str, content: ForwardBackwardRun) -> RunReport | None:
        """Run the next forward pass of a mini-batch, with its gradient; report after the last."""

        def begin() -> Turns[RunReport]:
            mini_batch = self._take(model_id, content.run)
            engine = self._models[model_id].engine
            return train_mini_batch(engine, mini_batch, content, ranks=self._ranks)

        return self._next_turn(model_id, begin)

    def optim_step(self, model_id: str, settings: AdamSettings) -> StepReport:
        """Apply the gradients of all ranks; without any, their sum is zero."""
        return self._models[model_id].engine.optim_step(settings)

    def save(
        self, model_id: str, folder: Path, *, optimizer: bool, files: Mapping[str, bytes]
    ) -> int:
        """Write weights and further files in one rename, on the first rank; return their bytes."""
        if not self._ranks.is_first:
            return 0
        with new_folder(folder) as written:
            write(self._models[model_id], written, optimizer=optimizer)
            for name, content in files.items():
                (written / name).write_bytes(content)
            return _size(written)

    def export(self, record: ModelRecord, folder: Path, *, recipients: Sequence[str]) -> int:
        """Write weights for other programs, in one rename, on the first rank; return their bytes.

        The folder names the base model as clients do. With recipients all files are encrypted.
        """
        if not self._ranks.is_first:
            return 0
        with new_folder(folder) as written:
            model = self._models[record.model_id]
            write(model, written, optimizer=False)
            if model.adapter is not None:
                name_base(written, record.base_model)
            if recipients:
                encrypt_folder(written, recipients)
            return _size(written)

    def nothing(self) -> None:
        """Do nothing: ranks that wait for too long would end."""


def _size(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


_STOP: Final = ""


class Lockstep:
    """Calls of the first rank that all ranks make, each with its own host; other ranks `follow`."""

    def __init__(self, host: Host, ranks: Ranks = ONE_RANK) -> None:
        self._host = host
        self._ranks = ranks

    def __call__(
        self,
        method: Callable[Concatenate[Host, _P], _Value],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> list[_Value]:
        """Return the results of a method on all ranks, or raise the first error of any rank."""
        self._broadcast(method.__name__, args, kwargs)
        return self._run(method.__name__, args, kwargs)

    def follow(self) -> None:
        """Make the calls of the first rank until it stops."""
        while True:
            name, args, kwargs = self._broadcast(_STOP, (), {})
            if name == _STOP:
                return
            try:
                self._run(name, args, kwargs)
            except Exception:  # the first rank has it too, and reports it
                logger.debug("%s failed", name, exc_info=True)

    def stop(self) -> None:
        """Let the other ranks return from `follow`."""
        self._broadcast(_STOP, (), {})

    def _broadcast(self, name: str, args: Any, kwargs: Any) -> tuple[str, Any, Any]:
        with _exiting_alone():
            return self._ranks.broadcast((name, args, kwargs))

    def _run(self, name: str, args: Any, kwargs: Any) -> list[Any]:
        value: Any = None
        error: Exception | None = None
        try:
            value = getattr(self._host, name)(*args, **kwargs)
        except Exception as caught:  # noqa: BLE001 - raised below, on all ranks
            error = caught
        with _exiting_alone():
            found = self._ranks.gather((value, _picklable(error)))
        if error is not None:
            raise error
        for _, other in found:
            if other is not None:
                raise other
        return [each for each, _ in found]


@contextlib.contextmanager
def _exiting_alone() -> Iterator[None]:
    """End the process if another rank has ended: no operation has failed, and all ranks restart."""
    try:
        yield
    except RuntimeError as error:
        raise SystemExit(f"another rank has ended: {error}") from error


def _picklable(error: Exception | None) -> Exception | None:
    if error is None or isinstance(error, TurnstreamError):
        return error
    return RankError(f"{type(error).__name__}: {error}")
