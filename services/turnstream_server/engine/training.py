"""Training operations of a hosted model, and their results."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from turnstream_server.engine.host import DatumOutput, Host, Lockstep, Outputs
from turnstream_server.failpoints import failpoint
from turnstream_server.operations.contents import OptimStep
from turnstream_server.operations.keys import parse_request_id
from turnstream_server.operations.log import Run
from turnstream_server.operations.results import Answer, Failure, Result, TrainingOutput
from turnstream_server.trainer.passes import Turns
from turnstream_server.trainer.settings import AdamSettings

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

NO_ROWS: Final = Failure("the batcher has returned no rows of this call: it was not run", "server")
_TOO_LARGE: Final = "weights, advantages or differences of logprobs are too large"


class PassError(Exception):
    """A pass has failed; the gradient may have a part of it."""


def run_training(
    call: Lockstep, model_id: str, run: Run, *, skipped: frozenset[int] | None = None
) -> Turns[dict[int, Result]]:
    """Run training calls that share passes; return the result of each by its number.

    Pauses between forward passes, which other models may use. A call whose loss is not finite
    fails, and so do all of them if their gradient is not finite. After a failure that
    `leaves_gradient`, the gradient has a part of the failed calls. `skipped` are the calls without
    effect when calls are run again: then the gradient is not checked.

    Raises:
        PassError: a pass has failed. Every other error comes before the first pass.
    """
    began_s = time.perf_counter()
    call(Host.read, model_id, run, skipped or frozenset())
    read_s = time.perf_counter()
    adds_gradient = run.kind == "forward_backward"
    try:
        outputs = yield from in_turns(
            lambda: call(Host.train, model_id, adds_gradient=adds_gradient)
        )
    except Exception as error:
        raise PassError(f"{type(error).__name__}: {error}") from error
    times_ms = 1e3 * (read_s - began_s), 1e3 * (time.perf_counter() - read_s)
    logger.debug(
        "model %s: %s %d: rows read in %.2f ms, passes run in %.2f ms",
        *(model_id, run.kind, run.first, *times_ms),
    )
    results = training_results(run, outputs)
    if not adds_gradient or skipped is not None or any(map(leaves_gradient, results.values())):
        return results
    if all(call(Host.has_finite_gradient, model_id)):
        return results
    named = f"calls {run.first} to {run.last}" if run.last > run.first else f"call {run.first}"
    text = f"the gradient of {named} is not finite: {_TOO_LARGE}. It was not added"
    return dict.fromkeys(run.numbers, Failure(text, "user"))


def leaves_gradient(result: Result) -> bool:
    """Return whether a training call has run and failed."""
    return isinstance(result, Failure) and result != NO_ROWS


def in_turns(call: Callable[[], list[_Value | None]]) -> Turns[list[_Value]]:
    """Repeat a call of all ranks, with a pause after each, until it returns their results."""
    while True:
        found = [each for each in call() if each is not None]
        if found:
            return found
        failpoint("engine.after_pass")
        yield


def run_optim_step(call: Lockstep, model_id: str, content: OptimStep) -> Answer:
    """Apply a step of AdamW, and return its metrics; BatchingError for a refused setting."""
    settings = AdamSettings(
        learning_rate=content.learning_rate,
        beta1=content.beta1,
        beta2=content.beta2,
        eps=content.eps,
        weight_decay=content.weight_decay,
        max_grad_norm=content.grad_clip_norm,
    )
    report = call(Host.optim_step, model_id, settings)[0]
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


def _result(data: dict[int, DatumOutput]) -> TrainingOutput | Failure:
    for place in sorted(data):
        if not math.isfinite(loss := data[place].loss):
            text = f"datum {place}: the loss is {loss}: {_TOO_LARGE}. No gradient was added"
            return Failure(text, "user")
    in_order = [data[place] for place in sorted(data)]
    return TrainingOutput(
        [each.logprobs for each in in_order],
        {"loss:sum": math.fsum(each.loss for each in in_order)},
    )
