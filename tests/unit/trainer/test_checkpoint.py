import json
from pathlib import Path

import pytest
import torch

from testkit.training.training import make_critic, make_engine, make_mini_batch
from turnstream.errors import InvalidConfigError, UnknownFormatError
from turnstream.types import RecoveryToken
from turnstream_server.models.policy import load_policy
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.trainer.checkpoint import Checkpoints
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.service import train
from turnstream_server.trainer.settings import ScheduleSettings


def _token(step: int) -> RecoveryToken:
    return RecoveryToken(lineage="main", step=step, chain_hash=f"{step:064x}")


def test_resumed_training_equals_undisturbed_training(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    schedule = ScheduleSettings(name="cosine", warmup_updates=2, total_updates=9)
    uninterrupted = make_engine(schedule=schedule)
    for _ in range(3):
        uninterrupted.update(make_mini_batch(), aggregation="token_mean")
    checkpoints.save(uninterrupted, _token(3))
    expected = [torch.rand(2), uninterrupted.update(make_mini_batch(), aggregation="token_mean")]

    newest = Checkpoints(tmp_path).newest()
    assert newest is not None
    resumed = make_engine(load_policy(newest.folder), schedule=schedule)
    checkpoints.restore(newest, resumed)
    actual = [torch.rand(2), resumed.update(make_mini_batch(), aggregation="token_mean")]

    assert newest.token == _token(3)
    assert torch.equal(actual[0], expected[0])
    assert actual[1] == expected[1]
    assert resumed.num_updates == uninterrupted.num_updates == 4
    weights = zip(resumed.model.parameters(), uninterrupted.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)


def test_checkpoint_without_a_critic_is_refused_by_a_trainer_with_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    saved = checkpoints.save(make_engine(), _token(1))

    with pytest.raises(InvalidConfigError, match="--critic: the checkpoint has no critic"):
        checkpoints.restore(saved, make_engine(critic=make_critic()))


@pytest.mark.parametrize("last_call", ["torch.save", "os.fsync", "pathlib.Path.rename"])
def test_half_written_checkpoint_is_ignored_and_removed_by_the_next_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    last_call: str,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    engine = make_engine()
    checkpoints.save(engine, _token(1))
    with monkeypatch.context() as patched:
        patched.setattr(last_call, _die)
        patched.setattr("shutil.rmtree", lambda *_, **__: None)  # the dead clean nothing up
        with pytest.raises(_KilledError):
            checkpoints.save(engine, _token(2))
    left = len(list(tmp_path.iterdir()))

    newest = Checkpoints(tmp_path).newest()

    assert left == 2
    assert "which was not finished" in caplog.text
    assert newest is not None
    assert newest.token.step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "checkpoint.json"])
@pytest.mark.parametrize("is_empty", [False, True])
def test_partial_copy_is_ignored_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, is_empty: bool
) -> None:
    checkpoints = Checkpoints(tmp_path)
    engine = make_engine()
    whole = checkpoints.save(engine, _token(1))
    partial = checkpoints.save(engine, _token(2)).folder
    (partial / name).unlink()
    if is_empty:
        (partial / name).touch()

    newest = checkpoints.newest()

    assert newest == whole
    assert f"ignored {partial}, which is partial" in caplog.text


def test_newest_complete_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    assert checkpoints.newest() is None
    engine = make_engine()
    for step in (7, 8, 9, 10, 11, 100):
        checkpoints.save(engine, _token(step))
    for step in (7, 11):
        (tmp_path / f"step-{step:08d}" / "state.pt").unlink()
    before = len([*tmp_path.iterdir()])

    checkpoints.prune()

    newest = checkpoints.newest()
    assert newest is not None
    assert newest.token.step == 100
    kept = sorted(int(path.name.removeprefix("step-")) for path in tmp_path.iterdir())
    assert (before, kept) == (6, [9, 10, 11, 100])


def test_fsdp2_is_refused_for_one_rank_and_over_a_whole_checkpoint(tmp_path: Path) -> None:
    spec = SmallModelSpec(vocab_size=128, hidden_size=16, num_layers=1, num_heads=2)
    config = TrainerConfig(run="run", folder=tmp_path, small_model=spec, parallel="fsdp2")

    with pytest.raises(InvalidConfigError, match=r"--parallel: fsdp2.* one rank.* with torchrun"):
        train(config)
    Checkpoints(tmp_path / "checkpoints").save(make_engine(), _token(1))
    with pytest.raises(InvalidConfigError, match=r"step-00000001 was written with ddp"):
        train(config)


class _KilledError(BaseException):
    """Stands for the end of the process."""


def _die(*_: object) -> None:
    raise _KilledError


def test_checkpoint_of_another_release_is_refused_with_both_formats(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(make_engine(), _token(1)).folder
    about = json.loads((folder / "checkpoint.json").read_text())

    for written, sentence in ((0, "an older release of Turnstream"), (2, "a newer release")):
        (folder / "checkpoint.json").write_text(json.dumps({**about, "format": written}))
        with pytest.raises(UnknownFormatError, match=sentence) as refused:
            checkpoints.newest()
        assert (refused.value.version, refused.value.supported) == (written, 1)
