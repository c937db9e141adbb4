"""Training commands of a hosted model, and their results."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from typing import Final

from turnstream.errors import BatchingError, RejectedError
from turnstream_server.commands.contents import OptimStep
from turnstream_server.commands.log import Run
from turnstream_server.commands.request_ids import parse_request_id
from turnstream_server.commands.results import Answer, Failure, Result, TrainingOutput
from turnstream_server.engine.host import DatumOutput, Host, Lockstep, Outputs
from turnstream_server.trainer.settings import AdamSettings

logger = logging.getLogger(__name__)

NO_ROWS: Final = Failure("the batcher has returned no rows of this call: it was not run", "server")


class PassError(Exception):
    """A pass has failed; the gradient may have a part of it."""


def run_training(
    call: Lockstep, model_id: str, run: Run, *, skipped: frozenset[int] = frozenset()
) -> dict[int, Result]:
    """Run training calls that share passes; return the result of each by its number.

    Args:
        call: calls of all ranks.
        model_id: the model.
        run: the calls.
        skipped: numbers of calls without effect.

    Raises:
        PassError: a pass has failed. Every other error comes before the first pass.
    """
    began_s = time.perf_counter()
    call(Host.read, model_id, run, skipped)
    read_s = time.perf_counter()
    adds_gradient = run.kind == "forward_backward"
    try:
        outputs = call(Host.train, model_id, adds_gradient=adds_gradient)
    except Exception as error:
        raise PassError(f"{type(error).__name__}: {error}") from error
    times_ms = 1e3 * (read_s - began_s), 1e3 * (time.perf_counter() - read_s)
    logger.debug(
        "model %s: %s %d: rows read in %.2f ms, passes run in %.2f ms",
        *(model_id, run.kind, run.first, *times_ms),
    )
    return training_results(run, outputs)


def run_optim_step(call: Lockstep, model_id: str, content: OptimStep) -> Answer:
    """Apply a step of AdamW, and return its metrics.

    Raises:
        BatchingError: a setting is refused, or there is no gradient; the model is unchanged.
    """
    settings = AdamSettings(
        learning_rate=content.learning_rate,
        beta1=content.beta1,
        beta2=content.beta2,
        eps=content.eps,
        weight_decay=content.weight_decay,
        max_grad_norm=content.grad_clip_norm,
    )
    try:
        report = call(Host.optim_step, model_id, settings)[0]
    except RejectedError as error:
        raise BatchingError(str(error)) from error
    if report.skip_reason:
        logger.warning("model %s: optim_step skipped: %s", model_id, report.skip_reason)
    metrics = {"learning_rate": report.learning_rate, "skipped": float(not report.is_applied)}
    if math.isfinite(report.gradient_norm):  # JSON has no NaN
        metrics["grad_norm"] = report.gradient_norm
    return Answer({"metrics": metrics, "type": "optim_step"})


def training_results(run: Run, outputs: Iterable[Outputs]) -> dict[int, Result]:
    """Return the results of calls from those of all ranks; each has its own sums."""
    by_number: dict[int, dict[int, DatumOutput]] = {}
    for own in outputs:
        for (request_id, place), output in own.items():
            number = parse_request_id(request_id).number
            by_number.setdefault(number, {})[place] = output
    return {
        number: _result(by_number[number]) if number in by_number else NO_ROWS
        for number in run.numbers
    }


def _result(data: dict[int, DatumOutput]) -> TrainingOutput:
    in_order = [data[place] for place in sorted(data)]
    return TrainingOutput(
        [each.logprobs for each in in_order],
        {"loss:sum": math.fsum(each.loss for each in in_order)},
    )
