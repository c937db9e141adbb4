"""Workers of several ranks."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from testkit.hosted import STEP, HostedClient, ModelHost, datums, save, serve_ranks
from testkit.ranks import run_ranks
from turnstream.batching.packing.microbatch import Budget
from turnstream_server.batcher.assembly import operation_shares
from turnstream_server.operations.contents import LoadWeights
from turnstream_server.operations.results import TrainingOutput

_SMALL = Budget(limit=8)


def make_model(model_host: ModelHost) -> HostedClient:
    """Return a model whose first call has more rows than ranks, and whose last one has fewer.

    A call that fails has several passes, and so has the next one.
    """
    bad = datums(3, *[6] * 8)
    bad.data[0].model_input[1] = 500  # on one rank alone
    model = model_host.make(
        datums(1, 5, 3, 7), datums(2, 4, loss="dro"), STEP, save("mid"), bad, STEP
    )
    calls = (datums(4, *[5] * 8), STEP, datums(4), STEP, save("end"))
    model.submit(LoadWeights(model.path("mid"), optimizer=True), *calls)
    return model


def test_two_ranks_equal_one(
    model_host: ModelHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes more than 5 s: two ranks start over gloo, with torch."""
    monkeypatch.setattr(operation_shares, "_BUDGET", _SMALL)
    one = make_model(model_host)
    model_host.run(one)
    two = make_model(model_host)

    run_ranks([2], tmp_path, functools.partial(serve_ranks, model_host, two, budget=_SMALL))

    assert two.failure(5).category == one.failure(5).category == "server"
    results, expected = two.results(), one.results()
    for number in (1, 2, 8, 10):
        output, wanted = results[number], expected[number]
        assert isinstance(output, TrainingOutput)
        assert isinstance(wanted, TrainingOutput)
        for actual, values in zip(output.logprobs, wanted.logprobs, strict=True):
            np.testing.assert_allclose(actual, values, rtol=1e-4)
    weights, others = one.saved("end"), two.saved("end")
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-4, atol=1e-6)
