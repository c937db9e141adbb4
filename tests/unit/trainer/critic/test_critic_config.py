"""Critics as a user types them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from turnstream.batching.scoring.token_advantages import gae
from turnstream.errors import InvalidConfigError
from turnstream.worker.losses import clipped_value_loss
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.critic.config import CriticConfig, GaeSettings


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


def test_defaults_are_those_of_the_functions() -> None:
    settings = GaeSettings()
    defaults = {name: each.default for name, each in inspect.signature(gae).parameters.items()}
    clip = inspect.signature(clipped_value_loss).parameters["clip"].default

    assert (settings.gamma, settings.lam) == (defaults["gamma"], defaults["lam"])
    assert settings.value_clip == clip


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
