"""Refused settings and checkpoints of `--parallel`."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.training import make_engine, make_model
from turnstream.errors import InvalidConfigError
from turnstream.types import RecoveryToken
from turnstream_server.models.adapters import Adapters
from turnstream_server.models.spec import AdapterConfig, SmallModelSpec
from turnstream_server.trainer.checkpoint import Checkpoints
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.service import train

SPEC = SmallModelSpec(vocab_size=128, hidden_size=16, num_layers=1, num_heads=2)


def test_fsdp2_with_one_rank_is_refused_with_the_way_to_start_more(tmp_path: Path) -> None:
    config = TrainerConfig(run="run", folder=tmp_path, small_model=SPEC, parallel="fsdp2")

    with pytest.raises(InvalidConfigError, match=r"--parallel: fsdp2.* one rank.* with torchrun"):
        train(config)


def test_checkpoint_of_the_other_kind_is_refused_with_both_names(tmp_path: Path) -> None:
    token = RecoveryToken(lineage="main", step=1, chain_hash="ab")
    Checkpoints(tmp_path / "checkpoints").save(make_engine(), token)
    config = TrainerConfig(run="run", folder=tmp_path, small_model=SPEC, parallel="fsdp2")

    with pytest.raises(
        InvalidConfigError, match=r"fsdp2, but .*step-00000001 was written with ddp"
    ):
        train(config)


def test_unknown_parallel_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="parallel: 'fsdp' is not one of ddp, fsdp2"):
        TrainerConfig(run="run", folder=tmp_path, small_model=SPEC, parallel="fsdp")


def test_state_of_an_adapter_with_another_alpha_is_refused() -> None:
    state = _adapter_engine(alpha=8).state_dict()

    with pytest.raises(InvalidConfigError, match=r"lora_alpha: 16.*, and the checkpoint has 8"):
        _adapter_engine(alpha=16).load_state_dict(state)


def _adapter_engine(*, alpha: float) -> Engine:
    adapter = Adapters(make_model(), Path()).add("one", AdapterConfig(rank=4, alpha=alpha))
    return make_engine(adapter.model, adapter=adapter)
