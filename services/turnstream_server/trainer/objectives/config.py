"""The objective of a trainer as settings: loss, corrections, KL, entropy bonus and denominators.

Without torch, so that the command line answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

from turnstream.errors import InvalidConfigError
from turnstream_server.trainer.combinations import check_objective
from turnstream_server.trainer.objectives.named_settings import parse_named
from turnstream_server.trainer.objectives.parameters import (
    CORRECTIONS,
    KL_ESTIMATES,
    LOSSES,
    CorrectionSettings,
    KlPenalty,
    LossSettings,
    PpoClip,
)
from turnstream_server.trainer.settings import require_one_of

Proximal = Literal["rollout", "recompute"]
"""Old log-probabilities: the generator's, or the trainer's at the start of the step."""

DenominatorRule = Literal["shipped", "recount"]
"""Divisors of a loss whose tokens a correction drops: all trained tokens, or those that remain."""

DEFAULT_LOSS = "ppo_clip:clip_high=0.28,dual_clip=3"

_CLIP_HIGHER: Final = PpoClip(clip_high=0.28, dual_clip=3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """One objective: loss * corrections + KL - entropy bonus, averaged over the mini-batch.

    Attributes:
        corrections: their weights are multiplied.
        kl: None: no reference policy.
        entropy_bonus: factor of the mean entropy, in units of the advantage per nat.
        proximal: source of the old log-probabilities.
        denominators: divisors of the policy loss.

    Raises:
        InvalidConfigError: a combination has no effect or no meaning. It names the option.
    """

    loss: LossSettings = _CLIP_HIGHER
    corrections: tuple[CorrectionSettings, ...] = ()
    kl: KlPenalty | None = None
    entropy_bonus: float = 0.0
    proximal: Proximal = "rollout"
    denominators: DenominatorRule = "shipped"

    def __post_init__(self) -> None:
        require_one_of("--proximal", self.proximal, get_args(Proximal))
        require_one_of("--denominators", self.denominators, get_args(DenominatorRule))
        if not 0 <= self.entropy_bonus < float("inf"):
            raise InvalidConfigError("--entropy-bonus", f"{self.entropy_bonus:g} is not at least 0")
        check_objective(self)

    @classmethod
    def parse(
        cls,
        *,
        loss: str = DEFAULT_LOSS,
        corrections: Sequence[str] = (),
        kl: str | None = None,
        entropy_bonus: float = 0.0,
        proximal: str | None = None,
        denominators: str = "shipped",
    ) -> ObjectiveConfig:
        """Return the objective that these options stand for.

        `proximal` None is "recompute" if the loss or a correction needs it, else "rollout". An
        unknown name, parameter or value is an InvalidConfigError.

        >>> str(ObjectiveConfig.parse(loss="gspo:clip_low=1e-4", corrections=["tis:cap=3"]))
        '--loss gspo:clip_low=0.0001 --correction tis:cap=3 --proximal recompute'
        """
        policy_loss = parse_named(loss, LOSSES, option="--loss")
        weights = tuple(parse_named(e, CORRECTIONS, option="--correction") for e in corrections)
        if proximal is None:
            needs_recompute = any(each.needs_recompute for each in (policy_loss, *weights))
            proximal = "recompute" if needs_recompute else "rollout"
        return cls(
            loss=policy_loss,
            corrections=weights,
            kl=None if kl is None else parse_named(kl, KL_ESTIMATES, option="--kl"),
            entropy_bonus=entropy_bonus,
            proximal=cast(Proximal, proximal),
            denominators=cast(DenominatorRule, denominators),
        )

    def __str__(self) -> str:
        words = [f"--loss {self.loss}", *(f"--correction {each}" for each in self.corrections)]
        if self.kl is not None:
            words.append(f"--kl {self.kl}")
        if self.entropy_bonus:
            words.append(f"--entropy-bonus {self.entropy_bonus:g}")
        if self.proximal != "rollout":
            words.append(f"--proximal {self.proximal}")
        if self.denominators != "shipped":
            words.append(f"--denominators {self.denominators}")
        return " ".join(words)
