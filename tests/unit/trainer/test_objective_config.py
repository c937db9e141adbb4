"""Objectives as a user types them: texts, defaults, and the refusals of a trainer."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from turnstream.errors import InvalidConfigError
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.objectives.config import ObjectiveConfig
from turnstream_server.trainer.objectives.objective import CORRECTION_FUNCTIONS, LOSS_FUNCTIONS
from turnstream_server.trainer.objectives.parameters import (
    CORRECTIONS,
    K3,
    KL_ESTIMATES,
    LOSSES,
    Gspo,
    Mis,
    Tis,
)


def test_options_of_an_objective_become_its_settings() -> None:
    config = ObjectiveConfig.parse(
        loss="gspo:clip_low=2e-4,clip_high=5e-4",
        corrections=["tis:cap=2.5", "mis:level=geometric,low=none"],
        kl="k3:coefficient=0.01,target=0.1",
        entropy_bonus=0.001,
        denominators="recount",
    )

    assert config == ObjectiveConfig(
        loss=Gspo(clip_low=2e-4, clip_high=5e-4),
        corrections=(Tis(cap=2.5), Mis(level="geometric")),
        kl=K3(coefficient=0.01, target=0.1),
        entropy_bonus=0.001,
        proximal="recompute",
        denominators="recount",
    )


@pytest.mark.parametrize(
    ("needing", "proximal"),
    [
        ({}, "rollout"),
        ({"corrections": ["opsm"]}, "rollout"),
        ({"loss": "dppo"}, "rollout"),
        ({"loss": "decoupled_ppo"}, "recompute"),
        ({"corrections": ["opsm", "icepop"]}, "recompute"),
    ],
)
def test_proximal_is_recomputed_where_it_is_needed(needing: Any, proximal: str) -> None:
    assert ObjectiveConfig.parse(**needing).proximal == proximal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "gpso"}, "--loss: 'gpso' is not one of ppo_clip, gspo, cispo"),
        ({"loss": "gspo:clip=1"}, "--loss: gspo: 'clip' is no parameter; parameters: clip_low, c"),
        ({"loss": "cross_entropy:a=1"}, "--loss: cross_entropy: 'a' is no parameter; .*: none"),
        ({"loss": "gspo:clip_low=few"}, "--loss: gspo: clip_low='few' is no number"),
        ({"loss": "gspo:clip_low=none"}, "--loss: gspo: clip_low='none' is no number"),
        ({"loss": "gspo:clip_low"}, "--loss: gspo: clip_low='' is no number"),
        ({"loss": "gspo:clip_low=nan"}, "--loss: gspo: clip_low=nan is no number"),
        ({"loss": "gspo:clip_low=-1"}, "--loss: gspo: clip_low=-1 is below 0"),
        ({"loss": "gspo:clip_low=1,clip_low=2"}, "--loss: gspo: clip_low is set twice"),
        ({"loss": "ppo_clip:dual_clip=1"}, "--loss: ppo_clip: dual_clip=1 is not above 1"),
        ({"loss": "clip_cov:low=6"}, "--loss: clip_cov: low=6 is not below high=5"),
        ({"loss": "dppo:divergence=js"}, "--loss: dppo: divergence='js' is not one of tv, kl"),
        ({"corrections": ["is"]}, "--correction: 'is' is not one of tis, icepop, mis"),
        ({"loss": "gspo:clip_low=2"}, "--loss: gspo: clip_low=2 is above 1"),
        ({"loss": "sapo:temperature_positive=inf"}, "--loss: sapo: temp.*=inf is above 1000"),
        ({"loss": "decoupled_ppo:behaviour_cap=0.5"}, "--loss: decoupled_ppo: behaviour_cap=0.5 i"),
        ({"loss": "clip_cov:share=0"}, "--loss: clip_cov: share=0 is not above 0"),
        ({"loss": "kl_cov:share=5"}, "--loss: kl_cov: share=5 is above 1"),
        ({"loss": "kl_cov:coefficient=0"}, "--loss: kl_cov: coefficient=0 is not above 0"),
        ({"loss": "dppo:threshold=2"}, "--loss: dppo: threshold=2 with divergence=tv masks no"),
        ({"corrections": ["tis:floor=3"]}, "--correction: tis: floor=3 is above 1: a ratio of 1, "),
        ({"corrections": ["tis:floor=1,cap=1"]}, "--correction: tis: no ratio but 1 is from 1 to"),
        ({"corrections": ["mis:low=3"]}, "--correction: mis: low=3 is above 1: a ratio of 1, "),
        ({"corrections": ["mis:high=0.4"]}, "--correction: mis: high=0.4 is below 1: a ratio"),
        ({"corrections": ["mis:level=geometric,high=0.5"]}, "--correction: mis: high=0.5 is below"),
        ({"corrections": ["mis:low=1,high=1"]}, "--correction: mis: no ratio but 1 is from 1 to 1"),
        (
            {"corrections": ["mis:low=0,high=inf,veto_below=0"]},
            "--correction: mis: every ratio is from 0 to inf: it drops no token",
        ),
        ({"corrections": ["row_veto:low=0"]}, "--correction: row_veto: every ratio is from 0 to"),
        ({"corrections": ["mis", "row_veto"]}, "--correction: row_veto: veto_below=0.0001 of mis"),
        ({"corrections": ["mis", "mis:low=0"]}, "--correction: mis: 2 of them at level=token drop"),
        ({"corrections": ["opsm", "opsm"]}, "--correction: opsm: 2 of them drop the tokens of the"),
        ({"corrections": ["opsm:delta=inf"]}, "--correction: opsm: delta=inf is above 1e"),
        ({"corrections": ["tis", "tis"]}, "--correction: tis: tis corrects the ratio already"),
        ({"corrections": ["tis"], "denominators": "recount"}, "--denominators: recount: no --corr"),
        (
            {"corrections": ["mis", "rescaled"], "denominators": "recount"},
            "--denominators: recount: rescaled makes up for dropped tokens already",
        ),
        ({"corrections": ["rescaled"]}, "--correction: rescaled: .* comes last"),
        ({"corrections": ["rescaled", "tis"]}, "--correction: rescaled: .* comes last"),
        ({"kl": "k4"}, "--kl: 'k4' is not one of k1, k2, k3"),
        ({"kl": "k3:target=0"}, "--kl: k3: target=0 is not above 0"),
        ({"kl": "k3:coefficient=0,target=1"}, "--kl: k3: coefficient=0 cannot adapt"),
        ({"kl": "k3:horizon=5"}, "--kl: k3: horizon=5 is not read without target"),
        ({"kl": "k2:coefficient=0,place=advantage"}, "--kl: k2: coefficient=0 with place=advanta"),
        ({"kl": "k1"}, "--kl: k1: place=loss has a gradient with a mean of 0: use k2 or k3"),
        ({"loss": "dppo", "proximal": "recompute"}, "--proximal: recompute: --loss dppo does not"),
        ({"entropy_bonus": -1.0}, "--entropy-bonus: -1 is not at least 0"),
        ({"proximal": "old"}, "--proximal: 'old' is not one of rollout, recompute"),
        ({"corrections": ["tis"], "proximal": "rollout"}, "--proximal: rollout: tis compares"),
        ({"loss": "decoupled_ppo", "proximal": "rollout"}, "--proximal: rollout: decoupled_ppo"),
        ({"denominators": "recount"}, "--denominators: recount: no --correction"),
        ({"denominators": "mean"}, "--denominators: 'mean' is not one of shipped, recount"),
    ],
)
def test_impossible_options_are_refused_with_option_and_value(options: Any, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"^{message}"):
        ObjectiveConfig.parse(**options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference": Path("/base")}, "--reference: /base is not read without --kl"),
        ({"temperature": math.inf}, "temperature: inf is not from 0.0001 to 1000"),
        ({"temperature": 1e-300}, "temperature: 1e-300 is not from 0.0001 to 1000"),
        ({"lora_alpha": 8.0}, "lora_alpha: 8.0 is not read without lora_rank above 0"),
        ({"lora_layers": "mlp"}, "lora_layers: mlp is not read without lora_rank above 0"),
        ({"schedule_updates": 9}, "schedule_updates: 9 is not read: constant_with_warmup has no"),
        ({"schedule_arguments": '{"power": 1e999}'}, "schedule_arguments: power is inf, not fini"),
        ({"kl": "k1:place=reward"}, "--kl: k1: place=reward needs --critic: .*=loss"),
        ({"critic": "policy", "loss": "cross_entropy"}, "--critic: --loss cross_entropy does not"),
        ({"shuffle": True}, "--shuffle: "),
        ({"shuffle": True, "epochs": 2, "seed": -1}, "--seed: "),
        *(
            ({name: "other"}, f"{name}: 'other' is not one of ")
            for name in ("layout", "dtype", "schedule", "parallel")
        ),
        *(
            ({name: 0}, f"{name}: 0 is ")
            for name in ("temperature", "checkpoint_every", "keep_checkpoints", "epochs")
        ),
        ({"push": ["tgi=http://a:1"]}, "--push: 'tgi=http://a:1' is not vllm=URL or sglang=URL"),
        ({"push": ["vllm=a:1"]}, "--push: 'a:1' is no address such as http://10.0.0.7:8000"),
        ({"push": ["vllm="]}, "--push: '' is no address"),
        ({"push": ["vllm=http://a:x"]}, "--push: 'http://a:x' is no address"),
        ({"weights_listen": "host"}, "--weights-listen: 'host'"),
        *(
            ({"metrics_listen": each}, f"--metrics-listen: '{each}' is not ")
            for each in ("host:port", "x", "host:", ":70000", "host:-1", "h:1:b")
        ),
    ],
)
def test_trainer_refuses_an_impossible_or_unread_setting(settings: Any, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"^{message}"):
        TrainerConfig(run="run", folder=Path(), **settings)


ALL = {**LOSSES, **CORRECTIONS, **KL_ESTIMATES}
FUNCTIONS = {**LOSS_FUNCTIONS, **CORRECTION_FUNCTIONS}
OF_A_SELECTION = {"clip_cov": {"share", "low", "high"}, "kl_cov": {"share"}}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_settings_have_the_parameters_and_defaults_of_their_function(name: str) -> None:
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    with_default = {
        e.name: e.default for e in parameters if e.default is not inspect.Parameter.empty
    }
    with_default.pop("row_of", None)
    chosen = OF_A_SELECTION.get(name, set())

    settings = ALL[name]().parameters()

    assert {key: value for key, value in settings.items() if key not in chosen} == with_default
    assert settings.keys() - with_default.keys() == chosen


CHANGED: dict[str, Any] = {
    **dict.fromkeys(("clip_low", "share", "threshold", "floor", "veto_below", "low"), 0.75),
    "dual_clip": 1.5,
    "place": "advantage",
}
"""Parameter to a value that is no default; 1.25 for all others."""


@pytest.mark.parametrize("name", ALL)
def test_text_of_settings_is_parsed_to_the_same_settings(name: str) -> None:
    kind = ALL[name]
    numbers = {each.name: CHANGED.get(each.name, 1.25) for each in fields(kind)}
    numbers = {key: value for key, value in numbers.items() if key not in ("level", "divergence")}
    options = {"--loss": "loss", "--correction": "corrections", "--kl": "kl"}
    changed: Any = kind(**numbers)
    text: Any = f"{changed}" if kind.option != "--correction" else [f"{changed}"]
    if name == "rescaled":
        text = ["opsm", "rescaled"]

    config = ObjectiveConfig.parse(**{options[kind.option]: text})

    found = {"--loss": config.loss, "--correction": config.corrections[-1:], "--kl": config.kl}
    expected = (changed,) if kind.option == "--correction" else changed
    assert found[kind.option] == expected
    assert str(kind()) == name


PAGE = (Path(__file__).parents[3] / "docs" / "objectives.md").read_text(encoding="utf-8")


def test_page_of_objectives_lists_every_name_with_its_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*)\|", PAGE, re.MULTILINE)
    listed = {name: re.findall(r"`([^`]*)`", cell) for name, cell in rows if name in ALL}

    def quoted(value: Any) -> str:
        return "none" if value is None else f"{value:g}" if isinstance(value, float) else value

    written = {
        name: [f"{key}={quoted(value)}" for key, value in kind().parameters().items()]
        for name, kind in ALL.items()
    }

    assert listed == written


def test_settings_of_a_trainer_load_no_torch() -> None:
    code = f"import sys, {TrainerConfig.__module__}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
