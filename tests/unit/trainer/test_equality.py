"""Loss and gradients of one mini-batch are those of a float64 reference, in all its forms.

Merged and step-wise rows, with trajectory weights; padded and packed; every cut into passes; with
and without inert rows; 1, 2 and 3 ranks, which have the whole model or shards of it. See
`testkit.equality.cases` for the cases of several ranks.

The tolerance of the loss is 1e-5 of its value. That of a gradient is 1e-5 of its largest value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from testkit.equality import Case, Found, cases, find_all, make_policy, reference, share
from testkit.training.ranks import run_ranks
from turnstream_server.trainer.ranks import ONE_RANK, Ranks
from turnstream_server.trainer.settings import Parallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE = 1e-5
TOLERANCE_CUDA = 1e-4
"""In float32 without TF32, whose sums have another order."""

NUM_DEVICES = torch.cuda.device_count()
FORMS_WITH_EQUAL_LOSS = ("token_mean", "rollout_mean", "prompt_mean", "seq_mean_token_mean")

OfRanks = list[dict[Parallel, dict[Case, Found]]]


@pytest.fixture(scope="module")
def expected() -> dict[Case, Found]:
    model = make_policy().double()
    known: dict[object, Found] = {}
    for case in cases():
        key = case.form, case.num_trajectories, case.aggregation
        known.setdefault(key, reference(model, case))
    return {case: known[case.form, case.num_trajectories, case.aggregation] for case in cases()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], OfRanks]:
    """`found(size)` returns what each of so many ranks computes."""

    @functools.cache
    def find(size: int) -> OfRanks:
        folder = tmp_path_factory.mktemp("equality")
        if size == 1:
            return [find_all(ONE_RANK, folder)]
        return run_ranks((size,), folder, find_all)[size]

    return find


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("form", ["merged", "step-wise"])
@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        *((1, "ddp"), (3, "ddp"), (3, "fsdp2")),
        *(pytest.param(2, each, marks=pytest.mark.campaign) for each in ("ddp", "fsdp2")),
    ],
)
def test_loss_and_gradients_equal_the_reference(
    expected: dict[Case, Found],
    found: Callable[[int], OfRanks],
    size: int,
    parallel: Parallel,
    form: str,
    layout: str,
) -> None:
    """Takes more than 5 s: the first case of a size starts its ranks, which compute all cases."""
    chosen = [case for case in cases(size) if (case.form, case.layout) == (form, layout)]
    assert len(chosen) >= (16 if size == 1 else 5)

    for case in chosen:
        for of_rank in found(size):
            _assert_close(of_rank[parallel][case], expected[case], tolerance=TOLERANCE)


@pytest.mark.parametrize("aggregation", FORMS_WITH_EQUAL_LOSS)
def test_step_wise_rows_train_as_merged_ones_do(
    expected: dict[Case, Found], aggregation: str
) -> None:
    # With seq_mean_token_mean, the weight of a row is its share of the trajectory's tokens. The
    # other aggregations that weigh rows divide by the number of rows or by a constant.
    pairs = [
        (expected[case._replace(form="step-wise")], wanted)
        for case, wanted in expected.items()
        if case.form == "merged" and case.aggregation == aggregation and case.limit == 12
    ]
    assert pairs

    for actual, wanted in pairs:
        _assert_close(actual, wanted, tolerance=1e-6)


def test_cases_have_every_cut_and_ranks_of_inert_rows_alone() -> None:
    ranks = [Ranks(rank=rank, world_size=3) for rank in range(3)]

    limits = {case.limit for case in cases() if case.aggregation == "token_mean"}
    real = {min(share(case, rank).info.num_real_rows for rank in ranks) for case in cases()}
    inert = {share(case, ranks[0]).info.num_inert_rows for case in cases()}

    assert len(limits) > 10
    assert 0 in real
    assert max(real) > 0
    assert 1 in inert


@pytest.mark.gpu
@pytest.mark.skipif(NUM_DEVICES < 1, reason="needs a CUDA device")
def test_loss_and_gradients_on_cuda_equal_the_reference(
    expected: dict[Case, Found], tmp_path: Path
) -> None:
    ((of_rank,),) = run_ranks((1,), tmp_path, find_all, device="cuda").values()

    for case, wanted in expected.items():
        _assert_close(of_rank["ddp"][case], wanted, tolerance=TOLERANCE_CUDA)


@pytest.mark.gpu
@pytest.mark.skipif(NUM_DEVICES < 2, reason="needs 2 CUDA devices")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_loss_and_gradients_over_nccl_equal_the_reference(
    expected: dict[Case, Found], tmp_path: Path, parallel: Parallel
) -> None:
    (ranks,) = run_ranks((2,), tmp_path, find_all, device="cuda").values()

    for case in cases(2):
        for of_rank in ranks:
            _assert_close(of_rank[parallel][case], expected[case], tolerance=TOLERANCE_CUDA)


def _assert_close(actual: Found, wanted: Found, *, tolerance: float) -> None:
    assert abs(actual.loss - wanted.loss) <= tolerance * abs(wanted.loss)
    assert actual.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        difference = (actual.gradients[name] - gradient).abs().max()
        assert difference <= tolerance * gradient.abs().max(), name
