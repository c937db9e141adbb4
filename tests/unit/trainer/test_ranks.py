"""Updates of two and three ranks over gloo agree with those of one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from testkit.training.ranks import WORLD_SIZES, Outcome, outcome, run_ranks, sharded_folder
from testkit.training.training import make_model
from turnstream.errors import InvalidConfigError
from turnstream.worker.launch import Launch
from turnstream_server.models.adapters import Adapters
from turnstream_server.models.policy import load_policy
from turnstream_server.trainer.checkpoint import Checkpoints
from turnstream_server.trainer.ranks import ONE_RANK, buckets, join_ranks

Outcomes = dict[int, list[Outcome]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all checkpoints."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    """Return the outcomes of all ranks by world size."""
    return {1: [outcome(ONE_RANK, folder / "1")], **run_ranks(WORLD_SIZES, folder, outcome)}


CASES = [
    *("padded", "clipped", "recomputed layers", "adapter", "adapter packed", "all parts"),
    *("rescaled", "critic", "critic packed", "critic, a row without logprobs"),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("parallel", ["updates", "sharded"])
def test_loss_and_gradients_of_several_ranks_equal_those_of_one(
    outcomes: Outcomes, parallel: str, case: str
) -> None:
    """Takes more than 5 s: the first case starts three ranks, which compute all cases."""
    expected = outcomes[1][0].updates[case]
    assert expected.gradients

    for actual in (getattr(each, parallel)[case] for each in outcomes[3]):
        assert actual.report.loss == pytest.approx(expected.report.loss, rel=1e-5)
        assert actual.report.statistics == pytest.approx(expected.report.statistics, rel=1e-4)
        assert actual.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            difference = (actual.gradients[name] - gradient).abs().max()
            assert difference <= 1e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("parallel", ["updates", "sharded"])
def test_ranks_have_bit_equal_gradients_weights_and_reports(
    outcomes: Outcomes, parallel: str
) -> None:
    first, *others = (getattr(each, parallel) for each in outcomes[3])
    for other in others:
        for case in first.keys() - {"infinite"}:
            assert other[case].report == first[case].report
            for field in ("gradients", "weights"):
                theirs, ours = getattr(other[case], field), getattr(first[case], field)
                assert all(torch.equal(theirs[name], each) for name, each in ours.items())


@pytest.mark.parametrize("parallel", ["updates", "sharded"])
def test_infinite_gradient_of_one_rank_is_skipped_by_all(outcomes: Outcomes, parallel: str) -> None:
    before = outcomes[1][0].updates["infinite"]

    for actual in (getattr(each, parallel)["infinite"] for each in outcomes[3]):
        assert "gradient norm is" in getattr(actual.report, "skip_reason", "")
        for name, weight in before.weights.items():
            assert torch.equal(actual.weights[name], weight)


@pytest.mark.parametrize(("size", "total"), [(1, 1.0), (2, 3.0), (3, 6.0)])
def test_missing_gradient_is_zero_unless_no_rank_has_one(
    outcomes: Outcomes, size: int, total: float
) -> None:
    for of_all, of_first, of_none in (each.sums for each in outcomes[size]):
        assert of_none is None
        assert of_all is not None
        assert of_all.tolist() == [total, total]
        if size > 1:
            assert of_first is not None
            assert of_first.tolist() == [5.0, 7.0]


def test_other_weights_on_one_rank_are_refused_on_all(outcomes: Outcomes) -> None:
    assert outcomes[1][0].refusal == ""
    for size in (2, 3):
        refusals = {each.refusal for each in outcomes[size]}
        assert len(refusals) == 1
        assert f"other weights on rank {size - 1} than on rank 0" in refusals.pop()


def test_checkpoint_restores_the_random_numbers_of_each_rank(outcomes: Outcomes) -> None:
    for size in (1, 2, 3):
        drawn = [each.random for each in outcomes[size]]
        assert all(torch.equal(expected, actual) for expected, actual in drawn)
        assert len({tuple(expected.tolist()) for expected, _ in drawn}) == size


RESUMED = ["all weights", "adapter", "critic"]


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_sharded_checkpoint_resumes_to_bit_equal_weights(
    outcomes: Outcomes, name: str, size: int
) -> None:
    for resumed in (each.resumed[name] for each in outcomes[size]):
        assert resumed.expected.keys() == resumed.actual.keys() == resumed.saved.keys()
        for key, expected in resumed.expected.items():
            assert torch.equal(resumed.actual[key], expected)
        assert any(
            not torch.equal(resumed.saved[key], each) for key, each in resumed.expected.items()
        )


@pytest.mark.parametrize("name", RESUMED)
def test_sharded_checkpoint_restores_on_another_number_of_ranks(
    outcomes: Outcomes, name: str
) -> None:
    saved = outcomes[2][0].resumed[name].saved

    for restored in (each.resumed[name].restored for each in outcomes[3]):
        assert restored is not None
        assert restored.keys() == saved.keys()
        assert all(torch.equal(restored[key], each) for key, each in saved.items())


@pytest.mark.parametrize("name", ["all weights", "adapter"])
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_published_weights_of_a_sharded_model_are_whole(
    outcomes: Outcomes, folder: Path, size: int, name: str
) -> None:
    saved = outcomes[size][0].resumed[name].saved
    written = sharded_folder(folder, name, size) / "published"
    if name == "adapter":
        published = Adapters(make_model(seed=5), Path()).load("default", written)
    else:
        published = load_policy(written)

    weights = {f"policy/weight/{name}": each for name, each in published.named_parameters()}

    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[key], each) for key, each in saved.items())


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_sharded_checkpoint_without_the_file_of_a_rank_is_ignored(
    outcomes: Outcomes, folder: Path, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert outcomes[size]
    copied = tmp_path / "step-00000002"
    shutil.copytree(sharded_folder(folder, "adapter", size) / copied.name, copied)
    whole = Checkpoints(tmp_path).newest()
    (copied / f"__{size - 1}_0.distcp").unlink()

    assert whole is not None
    assert whole.is_sharded
    assert Checkpoints(tmp_path).newest() is None
    assert f"ignored {copied}, which is partial: __{size - 1}_0.distcp" in caplog.text


def test_rank_without_the_address_of_the_first_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    with pytest.raises(InvalidConfigError, match="MASTER_ADDR"), join_ranks(Launch(1, 2, "s")):
        pass


def test_bucket_holds_tensors_of_one_type_and_at_most_its_bytes() -> None:
    sizes = [(2, torch.float32), (1, torch.float32), (9, torch.float32), (1, torch.bfloat16)]
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in sizes]

    found = [[each.numel() for each in bucket] for bucket in buckets(tensors, num_bytes=12)]

    assert found == [[2, 1], [9], [1]]
    assert list(buckets([])) == []


def test_calls_of_the_only_rank_need_no_connection(tmp_path: Path) -> None:
    with join_ranks(Launch(0, 1, "")) as ranks:
        assert ranks.gather(tmp_path) == [tmp_path]
        assert ranks.broadcast("value") == "value"
        ranks.barrier()
    assert not torch.distributed.is_initialized()
