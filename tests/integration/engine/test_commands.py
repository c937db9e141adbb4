"""Commands of hosted models: their results, and their effect on weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from testkit.training.hosted import (
    STEP,
    Forward,
    ModelHost,
    assert_equal,
    datums,
    passes_of_models,
    save,
)
from testkit.training.training import make_engine, pulled
from turnstream.batching.packing.microbatch import Budget
from turnstream.batching.rows.operations import Operation, operation_rows
from turnstream_server.batcher.assembly import operation_shares
from turnstream_server.operations.contents import OptimStep
from turnstream_server.operations.results import TrainingOutput
from turnstream_server.trainer.passes import OperationLoss

CALLS = (
    datums(1, 5, 3, 7),
    datums(2, 4, loss="importance_sampling"),
    datums(3, 6, 2),
)


def expected_output(operation: Operation) -> TrainingOutput:
    """Return the output of the base model, which a new adapter has too."""
    rows = pulled(operation_rows([operation], first_row_id=0))
    report = make_engine().forward_operations(rows, loss=OperationLoss(name=operation.loss))
    places = range(len(operation.data))
    loss = sum(report.losses[place] for place in places)
    return TrainingOutput([report.logprobs[place] for place in places], {"loss:sum": loss})


def test_calls_that_share_passes_have_results_of_their_own(model_host: ModelHost) -> None:
    forwards = [Forward(each) for each in CALLS]
    model = model_host.make(*CALLS, *forwards)

    model_host.run(model)

    results = model.results()
    for number, operation in enumerate((*CALLS, *CALLS), start=1):
        output, expected = results[number], expected_output(operation)
        assert isinstance(output, TrainingOutput), output
        assert output.metrics == pytest.approx(expected.metrics, rel=1e-5)
        for actual, wanted in zip(output.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


def test_calls_until_a_step_equal_one_call_with_all_data(model_host: ModelHost) -> None:
    whole = datums(1, 5, 3, 7)
    parts = [replace(whole, data=whole.data[:2]), replace(whole, data=whole.data[2:])]
    one = model_host.make(whole, STEP, save("end"))
    apart = model_host.make(parts[0], Forward(whole), parts[1], STEP, save("end"))

    model_host.run(one, apart)

    assert_close(one.saved("end"), apart.saved("end"))
    assert one.answer(2).content["metrics"] == pytest.approx(apart.answer(4).content["metrics"])
    assert one.answer(2).content["metrics"]["grad_norm"] > 0


def test_models_that_run_together_equal_each_one_alone(model_host: ModelHost) -> None:
    commands = (CALLS[0], STEP, CALLS[1], STEP, save("end"))
    others = (CALLS[2], CALLS[1], STEP, STEP, CALLS[0], STEP, save("end"))
    alone = model_host.make(*commands)
    model_host.run(alone)
    together = model_host.make(*commands)
    other = model_host.make(*others, lora_rank=2, train_mlp=False)

    model_host.run(together, other)

    assert_equal(alone.saved("end"), together.saved("end"))


def test_models_and_owners_take_turns_by_forward_passes(
    model_host: ModelHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation_shares, "_BUDGET", Budget(limit=8))
    large = datums(1, *[6] * 12)
    alone = model_host.make(large, STEP, save("end"))
    model_host.run(alone)
    crowd = [model_host.make(large, STEP, save("end")) for _ in range(3)]
    small = model_host.make(datums(2, 3), STEP, datums(3, 3), owner="owner-b")

    with passes_of_models() as passes:
        model_host.run(*crowd, small)

    names = [model.record.model_id for model in (*crowd, small)]
    order = [names.index(each) for each in passes]
    assert [order.count(each) for each in range(4)] == [12, 12, 12, 2]
    # A turn is one pass or one other command: the crowd has three creations, and then one pass.
    assert order[:3].count(3) == 2
    for at in range(6, 38):
        counts = [order[:at].count(each) for each in range(3)]
        assert max(counts) <= min(counts) + 3
    for model in crowd:
        assert_equal(alone.saved("end"), model.saved("end"))


def test_refused_steps_change_nothing_and_the_log_continues(model_host: ModelHost) -> None:
    no_eps, no_rate = replace_step(eps=0.0), replace_step(learning_rate=-1.0)
    model = model_host.make(CALLS[0], no_eps, no_rate, STEP, STEP, save("end"))
    plain = model_host.make(CALLS[0], STEP, STEP, save("end"))

    model_host.run(model, plain)

    words = {2: "eps: 0.0", 3: "learning_rate: -1.0"}
    for number, text in words.items():
        assert model.failure(number).category == "user"
        assert text in model.failure(number).error
    assert model.answer(4).content["metrics"]["learning_rate"] == STEP.learning_rate
    # A step without a gradient has gradient zero: the moments of the step before still count.
    assert model.answer(5).content["metrics"]["grad_norm"] == 0
    assert_equal(plain.saved("end"), model.saved("end"))


def test_step_clips_the_summed_gradient(model_host: ModelHost) -> None:
    model = model_host.make(CALLS[0], replace_step(grad_clip_norm=1e-3), save("end"))
    plain = model_host.make(CALLS[0], STEP, save("end"))

    model_host.run(model, plain)

    clipped, whole = model.saved("end")["0/exp_avg"], plain.saved("end")["0/exp_avg"]
    norm = plain.answer(2).content["metrics"]["grad_norm"]
    torch.testing.assert_close(clipped * norm / 1e-3, whole, rtol=1e-3, atol=1e-8)


def test_pass_that_fails_half_way_leaves_no_gradient(model_host: ModelHost) -> None:
    # The first of two passes adds its gradient before the second one fails.
    bad = datums(2, 4, loss="importance_sampling")
    bad.data[0].model_input[1] = 500
    model = model_host.make(CALLS[0], STEP, CALLS[2], bad, STEP, CALLS[2], STEP, save("end"))
    plain = model_host.make(CALLS[0], STEP, STEP, CALLS[2], STEP, save("end"))

    model_host.run(model, plain)

    assert [model.failure(number).category for number in (3, 4)] == ["server", "server"]
    assert model.answer(5).content["metrics"]["grad_norm"] == 0
    assert "forward_backward failed" in model.failure(3).error
    assert_equal(plain.saved("end"), model.saved("end"))


def weighted(value: float, *, of: int = 0) -> Operation:
    """Return a call whose weights have this value."""
    data = [
        replace(each, weights=np.full(each.target_tokens.shape, value, np.float32))
        for each in CALLS[of].data
    ]
    return replace(CALLS[of], data=data)


def test_call_with_an_infinite_loss_fails_alone_and_leaves_no_gradient(
    model_host: ModelHost,
) -> None:
    model = model_host.make(CALLS[0], weighted(3e38), CALLS[2], Forward(weighted(3e38)), STEP)
    plain = model_host.make(CALLS[0], CALLS[2], STEP, save("end"))
    model.submit(save("end"))

    model_host.run(model, plain)

    for number in (2, 4):
        assert model.failure(number).category == "user"
        assert "datum 0: the loss is inf: weights, advantages" in model.failure(number).error
    assert [type(model.results()[number]) for number in (1, 3)] == [TrainingOutput] * 2
    assert model.answer(5).content["metrics"]["skipped"] == 0
    assert_close(plain.saved("end"), model.saved("end"))


def test_call_with_an_infinite_gradient_fails_and_leaves_none(model_host: ModelHost) -> None:
    # The losses of two positions cancel, and the gradient overflows.
    signs = [np.where(np.arange(len(each.model_input)) % 2, -1, 1) for each in CALLS[0].data]
    data = [
        replace(each, weights=(3e37 * sign).astype(np.float32))
        for each, sign in zip(CALLS[0].data, signs, strict=True)
    ]
    huge = replace(CALLS[0], data=data)
    model = model_host.make(
        CALLS[0], Forward(huge), huge, Forward(huge), CALLS[2], STEP, save("end")
    )
    plain = model_host.make(CALLS[0], CALLS[2], STEP, save("end"))

    model_host.run(model, plain)

    assert isinstance(model.results()[2], TrainingOutput)
    assert model.failure(3).category == "user"
    assert "the gradient of call 3 is not finite" in model.failure(3).error
    assert model.answer(6).content["metrics"]["skipped"] == 0
    assert_close(plain.saved("end"), model.saved("end"))


def test_model_that_cannot_be_made_refuses_all_commands(model_host: ModelHost) -> None:
    model = model_host.make(CALLS[0], STEP, lora_rank=5)

    model_host.run(model, max_rank=4)

    assert "lora_rank" in model.failure(0).error
    assert "is 5, expected 1 to 4" in model.failure(0).error
    for number in (1, 2):
        assert "its create_model has failed" in model.failure(number).error


def replace_step(**values: float) -> OptimStep:
    return STEP._replace(**values)


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-6)
