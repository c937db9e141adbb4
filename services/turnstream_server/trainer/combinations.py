"""Rules over several settings of a trainer: every combination that is wrong or has no effect.

An error names the option to change, and the reason. A combination that no rule names has a loss and
a gradient equal to those of a slow reference: a test compares all pairs. Without torch, so that the
command line answers at once.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING

from turnstream.errors import InvalidConfigError
from turnstream_server.models.spec import LARGEST_TEMPERATURE, LEAST_TEMPERATURE
from turnstream_server.trainer.objectives.parameters import ClipCov, Dppo, KlPenalty, Mis, RowVeto

if TYPE_CHECKING:
    from turnstream_server.trainer.config import TrainerConfig
    from turnstream_server.trainer.critic.config import GaeSettings
    from turnstream_server.trainer.objectives.config import ObjectiveConfig


def check_objective(config: ObjectiveConfig) -> None:
    """Raise InvalidConfigError for a broken rule of an objective.

    >>> from turnstream_server.trainer.objectives.config import ObjectiveConfig
    >>> from turnstream_server.trainer.objectives.parameters import Dppo, Tis
    >>> ObjectiveConfig(loss=Dppo(), corrections=(Tis(),), proximal="recompute")
    Traceback (most recent call last):
    turnstream.errors.InvalidConfigError: --correction: tis: dppo corrects the ratio already
    """
    _check_loss(config)
    _check_ranges(config)
    _check_corrections(config)
    _check_denominators(config)
    if config.kl is not None:
        _check_kl(config.kl)
    _check_unread(config)


def check_critic(config: ObjectiveConfig, *, has_critic: bool) -> None:
    """Raise InvalidConfigError for a broken rule of an objective and a critic."""
    if config.kl is not None and config.kl.place == "reward" and not has_critic:
        message = "place=reward needs --critic: without one, use place=advantage or place=loss"
        raise config.kl.refusal(message)
    if has_critic and not config.loss.reads_advantages:
        message = f"--loss {config.loss.name} does not read the advantages that it estimates"
        raise InvalidConfigError("--critic", message)


def check_gae(settings: GaeSettings) -> None:
    """Raise InvalidConfigError for a broken rule of the parameters of a critic."""
    if settings.length_alpha is not None and settings.lam != settings.default_of("lam"):
        message = f"lam={settings.lam:g} does not go with length_alpha, which replaces it"
        raise settings.refusal(f"{message}: value_lam is the lambda of the returns")


def check_trainer(config: TrainerConfig) -> None:
    """Raise InvalidConfigError for a broken rule over other settings of a trainer process."""
    temperature = config.temperature
    if not LEAST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE:
        limits = f"from {LEAST_TEMPERATURE:g} to {LARGEST_TEMPERATURE:g}"
        raise InvalidConfigError("temperature", f"{temperature} is not {limits}")
    if config.shuffle and config.epochs == 1:
        raise InvalidConfigError("--shuffle", "a single epoch keeps its order: use --epochs")
    if config.shuffle and config.seed < 0:
        raise InvalidConfigError("--seed", f"{config.seed} is below 0, which --shuffle needs")
    if config.reference is not None and config.objective.kl is None:
        raise InvalidConfigError("--reference", f"{config.reference} is not read without --kl")
    defaults = {field.name: field.default for field in fields(config)}
    for name in ("lora_alpha", "lora_layers"):
        value = getattr(config, name)
        if config.lora_rank == 0 and value != defaults[name]:
            raise InvalidConfigError(name, f"{value} is not read without lora_rank above 0")


def _check_loss(config: ObjectiveConfig) -> None:
    loss = config.loss
    if isinstance(loss, ClipCov) and not loss.low < loss.high:
        raise loss.refusal(f"low={loss.low:g} is not below high={loss.high:g}: no token is between")
    if isinstance(loss, Dppo) and loss.divergence == "tv" and (loss.threshold or 0) >= 1:
        raise loss.refusal(
            f"threshold={loss.threshold:g} with divergence=tv masks no token: tv < 1"
        )


def _check_ranges(config: ObjectiveConfig) -> None:
    for each in config.corrections:
        low, high = each.kept_range
        if not low < high:
            raise each.refusal(f"no ratio but {low:g} is from {low:g} to {high:g}")
        vetoes = isinstance(each, Mis) and each.veto_below > 0
        if isinstance(each, Mis | RowVeto) and (low, high) == (0, math.inf) and not vetoes:
            raise each.refusal("every ratio is from 0 to inf: it drops no token")


def _check_corrections(config: ObjectiveConfig) -> None:
    names = [each.name for each in config.corrections]
    if "rescaled" in names and (names.index("rescaled") < len(names) - 1 or len(names) == 1):
        raise InvalidConfigError(
            "--correction", "rescaled: it scales the corrections before it, and comes last"
        )
    of_ratio = [each for each in (config.loss, *config.corrections) if each.corrects_ratio]
    if len(of_ratio) > 1:
        raise of_ratio[1].refusal(f"{of_ratio[0].name} corrects the ratio already")
    masks = Counter(
        (each.name, getattr(each, "level", "")) for each in config.corrections if each.drops_tokens
    )
    for (name, level), count in masks.items():
        if count > 1:
            place = f" at level={level}" if level else ""
            message = f"{name}: {count} of them{place} drop the tokens of the strictest: use one"
            raise InvalidConfigError("--correction", message)
    veto = max((each.veto_below for each in config.corrections if isinstance(each, Mis)), default=0)
    for each in config.corrections:
        if isinstance(each, RowVeto) and each.high == math.inf and each.low <= veto:
            raise each.refusal(f"veto_below={veto:g} of mis drops these rows already")


def _check_denominators(config: ObjectiveConfig) -> None:
    if config.denominators == "shipped":
        return
    if not any(each.drops_tokens for each in config.corrections):
        raise InvalidConfigError("--denominators", "recount: no --correction drops a token")
    if any(each.name == "rescaled" for each in config.corrections):
        message = "recount: rescaled makes up for dropped tokens already: use one of them"
        raise InvalidConfigError("--denominators", message)


def _check_kl(kl: KlPenalty) -> None:
    if kl.coefficient == 0 and kl.target is not None:
        raise kl.refusal("coefficient=0 cannot adapt to a target")
    if kl.coefficient == 0 and kl.place != "loss":
        raise kl.refusal(f"coefficient=0 with place={kl.place} changes nothing")
    if kl.target is None and kl.horizon != kl.default_of("horizon"):
        raise kl.refusal(f"horizon={kl.horizon:g} is not read without target")
    if kl.name == "k1" and kl.place == "loss" and kl.coefficient > 0:
        message = "place=loss has a gradient with a mean of 0: use k2 or k3 there"
        raise kl.refusal(f"{message}, or place=advantage")


def _check_unread(config: ObjectiveConfig) -> None:
    loss, kl = config.loss, config.kl
    needing = [each.name for each in (loss, *config.corrections) if each.needs_recompute]
    if needing and config.proximal == "rollout":
        message = f"rollout: {needing[0]} compares rollout numbers with recomputed ones"
        raise InvalidConfigError("--proximal", message)
    off_loss = kl if kl is not None and kl.place != "loss" else None
    if not loss.reads_advantages:
        if off_loss is not None:
            message = f"place={off_loss.place} is not read by --loss {loss.name}: use place=loss"
            raise off_loss.refusal(message)
        for each in config.corrections:
            if each.reads_advantages:
                raise each.refusal(f"it reads advantages, and --loss {loss.name} has none")
    reads_old = loss.reads_old or bool(config.corrections) or off_loss is not None
    if config.proximal == "recompute" and not reads_old:
        message = f"recompute: --loss {loss.name} does not read old log-probabilities"
        raise InvalidConfigError("--proximal", message)
