"""Critics as a user types them, and as a trainer builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from testkit.training.training import make_mini_batch, make_model
from turnstream.errors import InvalidConfigError
from turnstream_server.models.policy import load_policy, save_policy
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.critic.config import CriticConfig, GaeSettings
from turnstream_server.trainer.service import build_engine

POLICY = SmallModelSpec(vocab_size=128, hidden_size=16, num_layers=1)


@pytest.mark.parametrize(
    ("text", "source", "settings"),
    [
        ("policy", None, {}),
        ("models/base", Path("models/base"), {}),
        ("policy:lam=0.9,whiten=false", None, {"lam": 0.9, "whiten": "false"}),
        ("a:b:value_clip=none", Path("a:b"), {"value_clip": None}),
        ("policy:length_alpha=0.05,value_lam=1", None, {"length_alpha": 0.05, "value_lam": 1.0}),
    ],
)
def test_text_of_a_critic_becomes_its_settings_and_back(
    text: str, source: Path | None, settings: dict[str, Any]
) -> None:
    critic = CriticConfig.parse(text)

    assert critic == CriticConfig(source=source, gae=GaeSettings(**settings))
    assert CriticConfig.parse(str(critic)) == critic


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (":lam=0.9", "':lam=0.9' names neither a folder nor policy"),
        (
            "policy:lambda=0.9",
            "critic: 'lambda' is no parameter; parameters: gamma, lam, value_lam",
        ),
        ("policy:lam=1.1", "critic: lam=1.1 is above 1"),
        ("policy:gamma=-1", "critic: gamma=-1 is below 0"),
        ("policy:lam=none", "critic: lam='none' is no number"),
        ("policy:value_clip=0", "critic: value_clip=0 is not above 0"),
        ("policy:length_alpha=0", "critic: length_alpha=0 is not above 0"),
        ("policy:length_alpha=1e9,lam=0.9", "critic: lam=0.9 does not go with length_alpha"),
        *(
            (f"policy:learning_rate={rate}", f"critic: learning_rate={rate} is {problem}")
            for rate, problem in (("-1", "not above 0"), ("0", "not above 0"), ("inf", "above 1e"))
        ),
        ("policy:whiten=yes", "critic: whiten='yes' is not one of true, false"),
    ],
)
def test_impossible_critic_is_refused_with_option_and_value(text: str, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"^--critic: {message}"):
        TrainerConfig(run="run", folder=Path(), critic=text)


@pytest.mark.parametrize("source", ["policy", "folder"])
def test_critic_begins_with_the_layers_of_its_source(source: str, tmp_path: Path) -> None:
    save_policy(make_model(seed=4), tmp_path / "folder")
    text = "policy" if source == "policy" else str(tmp_path / source)

    engine = build_engine(_config(tmp_path, critic=text, layout="packed"))

    assert engine.critic is not None
    expected = engine.model if source == "policy" else make_model(seed=4)
    layers = engine.critic.model.backbone
    assert all(map(torch.equal, layers.parameters(), expected.base_model.parameters()))
    assert layers is not engine.model.base_model
    assert not engine.critic.values(make_mini_batch()).values.any()


def test_critic_of_an_adapter_begins_with_its_base_model(tmp_path: Path) -> None:
    first = build_engine(_config(tmp_path, lora_rank=2))
    with torch.no_grad():
        for weight in first.model.parameters():
            weight += 0.1 * weight.requires_grad  # the adapter has learned
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    first.gather_weights()(adapter)

    config = _config(tmp_path, small_model=None, policy=adapter, lora_rank=2, critic="policy")
    critic = build_engine(config).critic

    assert critic is not None
    expected = load_policy(POLICY).base_model
    assert all(map(torch.equal, critic.model.backbone.parameters(), expected.parameters()))
    assert all(each.requires_grad for each in critic.model.parameters())


def test_critic_without_its_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"^--critic: .*none is no model folder"):
        build_engine(_config(tmp_path, critic=str(tmp_path / "none")))


def _config(folder: Path, **changes: Any) -> TrainerConfig:
    fields: dict[str, Any] = {"small_model": POLICY, **changes}
    return TrainerConfig(run="run", folder=folder, **fields)
