"""Adapters in training: several on one base model, and their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from testkit.training.training import make_engine, make_mini_batch, make_model
from turnstream.errors import InvalidConfigError
from turnstream.types import RecoveryToken
from turnstream_server.models.adapters import Adapter, Adapters
from turnstream_server.models.policy import load_policy, save_policy
from turnstream_server.models.spec import AdapterConfig, SmallModelSpec
from turnstream_server.trainer.checkpoint import Checkpoints, publish_weights
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.objectives.config import ObjectiveConfig
from turnstream_server.trainer.objectives.objective import Objective
from turnstream_server.trainer.service import build_engine
from turnstream_server.trainer.settings import AdamSettings

ONE = AdapterConfig(rank=4, seed=1, train_unembedding=True)
ADVANTAGES = ([1.0, -0.5, 0.25, -1.5], [-1.0, 0.5, 2.0, 0.5], [0.5, 0.5, -1.0, 1.0])
SPEC = SmallModelSpec(vocab_size=128, hidden_size=16, intermediate_size=16, num_layers=1)


def test_training_an_adapter_changes_no_weight_of_the_base_model() -> None:
    adapter = Adapters(make_model(), Path()).add("one", ONE)
    engine = _engine(adapter)
    trained = engine.forward(_batch(0))

    for number in range(3):
        engine.update(_batch(number), aggregation="token_mean")

    with adapter.off():
        reference = make_engine().forward(_batch(0))
        off = Engine(engine.model, adam=AdamSettings(learning_rate=0.0)).forward(_batch(0))
    for row_id, logprobs in reference.items():
        assert (off[row_id] == logprobs).all()
        assert (trained[row_id] == logprobs).all()
    assert any((engine.forward(_batch(0))[row] != reference[row]).any() for row in reference)


def test_kl_of_an_adapter_is_measured_to_its_base_model() -> None:
    reports = []
    for reference in (None, make_model()):
        adapter = Adapters(make_model(), Path()).add("one", ONE)
        objective = Objective(ObjectiveConfig.parse(kl="k3:coefficient=0.5"))
        engine = _engine(adapter, objective=objective, reference=reference)
        reports.append([engine.update(_batch(k), aggregation="token_mean") for k in range(3)])

    alone, with_reference = reports
    assert alone[0].statistics["kl_reference"] == 0
    assert alone[2].statistics["kl_reference"] > 0
    assert [each.loss for each in alone] == [each.loss for each in with_reference]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_adapter_equals_undisturbed_training(tmp_path: Path, dtype: str) -> None:
    config = _config(tmp_path, dtype=dtype)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    uninterrupted = build_engine(config)
    for number in range(2):
        uninterrupted.update(_batch(number), aggregation="token_mean")
    saved = checkpoints.save(uninterrupted, RecoveryToken(lineage="main", step=2, chain_hash="ab"))
    expected = uninterrupted.update(_batch(2), aggregation="token_mean")

    resumed = build_engine(config, checkpoint=saved.folder)
    checkpoints.restore(saved, resumed)
    actual = resumed.update(_batch(2), aggregation="token_mean")

    assert {path.name for path in saved.folder.iterdir()} == {
        *("adapter_config.json", "adapter_model.safetensors", "checkpoint.json", "state.pt")
    }
    assert actual == expected
    pairs = zip(_trained(resumed), _trained(uninterrupted), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_published_adapter_is_what_a_generator_loads(tmp_path: Path) -> None:
    engine = build_engine(_config(tmp_path, learning_rate=0.1))
    engine.update(_batch(0), aggregation="token_mean")

    uri = publish_weights(tmp_path / "weights", engine.gather_weights(), version=3)

    ids = torch.tensor([[5, 6, 7]])
    published = load_policy(Path(uri.removeprefix("file://")))
    with torch.no_grad():
        assert torch.equal(published(ids).logits, engine.model(ids).logits)
        assert not torch.equal(published(ids).logits, load_policy(SPEC)(ids).logits)


Make = Callable[[Path], Path]


def _whole(folder: Path) -> Path:
    save_policy(load_policy(SPEC), folder / "whole")
    return folder / "whole"


def _adapter(folder: Path) -> Path:
    base = _whole(folder)
    (folder / "adapter").mkdir()
    Adapters(load_policy(base), base).add("one", AdapterConfig(rank=4)).write(folder / "adapter")
    return folder / "adapter"


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (_whole, {"lora_rank": 4}, "lora_rank: 4, but the checkpoint .* holds a whole model"),
        (_adapter, {"lora_rank": 0}, "lora_rank: 0, but .* holds an adapter"),
        (_adapter, {"lora_rank": 8}, "lora_rank: 8, and the loaded adapter has 4"),
        (_adapter, {"lora_alpha": 8.0}, "lora_alpha: 8.0, and the loaded adapter has 32"),
        (_adapter, {"lora_layers": "mlp"}, "lora_layers: "),
    ],
)
def test_checkpoint_of_another_kind_is_refused(
    tmp_path: Path, make: Make, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        build_engine(_config(tmp_path, **options), checkpoint=make(tmp_path))


def test_state_of_an_adapter_with_another_alpha_or_base_is_refused(tmp_path: Path) -> None:
    # A sharded checkpoint has no folder of the adapter, which would name the base model.
    own, other = (build_engine(_config(tmp_path / name)) for name in ("own", "other"))

    with pytest.raises(InvalidConfigError, match=r"^--policy: .*/own/base, and .*/other/base$"):
        own.load_state_dict(other.state_dict())
    with pytest.raises(InvalidConfigError, match=r"lora_alpha: 32.*, and the checkpoint has 8"):
        own.load_state_dict({**own.state_dict(), "lora_alpha": 8})


def test_adapter_folder_as_policy_is_trained_further(tmp_path: Path) -> None:
    folder = _adapter(tmp_path)

    engine = build_engine(_config(tmp_path, policy=folder, small_model=None))

    pairs = zip(_trained(engine), _weights(folder), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def _config(folder: Path, **changes: Any) -> TrainerConfig:
    fields = {"small_model": SPEC, "lora_rank": 4, "learning_rate": 1e-2, **changes}
    return TrainerConfig(run="run", folder=folder, **fields)


def _engine(adapter: Adapter, **options: Any) -> Engine:
    return make_engine(adapter.model, adapter=adapter, **options)


def _batch(number: int) -> Any:
    return make_mini_batch(advantages=ADVANTAGES[number], micro_batches=((0,), (1, 2), (3,)))


def _trained(engine: Engine) -> list[Tensor]:
    return [weight for name, weight in engine.model.named_parameters() if ".lora_" in name]


def _weights(folder: Path) -> list[Tensor]:
    loaded = load_policy(folder)
    return [weight for name, weight in loaded.named_parameters() if ".lora_" in name]
