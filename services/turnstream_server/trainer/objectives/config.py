"""The objective of a trainer as settings: loss, corrections, KL, entropy bonus and denominators.

Each name of an option is a dataclass of its parameters. The parameters and defaults of a loss or a
correction are those of its function in `turnstream.worker`. A test compares them. Without torch, so
that the command line answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar, cast, get_args

from turnstream.errors import InvalidConfigError
from turnstream_server.trainer.objectives.named_settings import NamedSettings, bounded, parse_named
from turnstream_server.trainer.settings import require_one_of

Proximal = Literal["rollout", "recompute"]
"""Old log-probabilities: the generator's, or the trainer's at the start of the step."""

DenominatorRule = Literal["shipped", "recount"]
"""Divisors of a loss whose tokens a correction drops: all trained tokens, or those that remain."""

DEFAULT_LOSS = "ppo_clip:clip_high=0.28,dual_clip=3"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings(NamedSettings):
    """Parameters of a policy loss."""

    option: ClassVar[str] = "--loss"
    needs_recompute: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoClip(LossSettings):
    """The clipped loss of PPO."""

    name: ClassVar[str] = "ppo_clip"
    clip_low: float = bounded(0.2, at_least=0)
    clip_high: float = bounded(0.2, at_least=0)
    dual_clip: float | None = bounded(None, above=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo(LossSettings):
    """The clipped loss with one ratio per row."""

    name: ClassVar[str] = "gspo"
    clip_low: float = bounded(3e-4, at_least=0)
    clip_high: float = bounded(4e-4, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo(LossSettings):
    """The policy gradient with a clipped ratio as weight."""

    name: ClassVar[str] = "cispo"
    clip_low: float = bounded(1.0, at_least=0)
    clip_high: float = bounded(0.28, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPpo(LossSettings):
    """The clipped loss against recomputed log-probabilities, weighted by old / behaviour."""

    name: ClassVar[str] = "decoupled_ppo"
    needs_recompute: ClassVar[bool] = True
    clip_low: float = bounded(0.2, at_least=0)
    clip_high: float = bounded(0.2, at_least=0)
    dual_clip: float | None = bounded(None, above=1)
    behaviour_cap: float = bounded(5.0, above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dppo(LossSettings):
    """The policy gradient with a mask by divergence from the behaviour policy."""

    name: ClassVar[str] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    threshold: float | None = bounded(None, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sapo(LossSettings):
    """The policy gradient with a soft gate on the ratio."""

    name: ClassVar[str] = "sapo"
    temperature_positive: float = bounded(1.0, above=0)
    temperature_negative: float = bounded(1.05, above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gmpo(LossSettings):
    """One ratio per row: the geometric mean of clipped ratios."""

    name: ClassVar[str] = "gmpo"
    clip_low: float = bounded(0.4, at_least=0)
    clip_high: float = bounded(0.4, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCov(LossSettings):
    """`ppo_clip` without some tokens of high covariance.

    Attributes:
        share: tokens without a gradient, as a share of the trained tokens; at least one token.
        low, high: range of the covariances that a token is chosen from.
    """

    name: ClassVar[str] = "clip_cov"
    clip_low: float = bounded(0.2, at_least=0)
    clip_high: float = bounded(0.2, at_least=0)
    share: float = bounded(2e-4, at_least=0)
    low: float = bounded(1.0)
    high: float = bounded(5.0)

    def __post_init__(self) -> None:
        LossSettings.__post_init__(self)
        self.refuse_empty_range(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCov(LossSettings):
    """The policy gradient with a KL penalty on the tokens of the highest covariance.

    Attributes:
        share: tokens with a penalty, as a share of the trained tokens; at least one token.
    """

    name: ClassVar[str] = "kl_cov"
    coefficient: float = bounded(1.0, at_least=0)
    share: float = bounded(2e-4, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy(LossSettings):
    """Supervised training; rewards and advantages have no effect."""

    name: ClassVar[str] = "cross_entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings(NamedSettings):
    """Parameters of a correction; those against the generator need recomputed numbers."""

    option: ClassVar[str] = "--correction"
    needs_recompute: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Tis(CorrectionSettings):
    """Truncated importance sampling."""

    name: ClassVar[str] = "tis"
    level: Literal["token", "sequence", "geometric"] = "token"
    cap: float = bounded(2.0, above=0)
    floor: float = bounded(0.0, at_least=0)

    def __post_init__(self) -> None:
        CorrectionSettings.__post_init__(self)
        if self.floor > self.cap:
            raise self.refusal(f"floor={self.floor:g} is above cap={self.cap:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _RangeSettings(CorrectionSettings):
    """Parameters of a correction that keeps a range of ratios."""

    low: float = bounded(0.0, at_least=0)
    high: float = bounded(0.0, at_least=0)

    def __post_init__(self) -> None:
        CorrectionSettings.__post_init__(self)
        self.refuse_empty_range(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class IcePop(_RangeSettings):
    """Ratios outside the range drop their token."""

    name: ClassVar[str] = "icepop"
    low: float = bounded(0.5, at_least=0)
    high: float = bounded(5.0, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mis(CorrectionSettings):
    """Masked importance sampling, by token or by row."""

    name: ClassVar[str] = "mis"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: float | None = bounded(None, at_least=0)
    high: float | None = bounded(None, at_least=0)
    veto_below: float = bounded(1e-4, at_least=0)

    def __post_init__(self) -> None:
        CorrectionSettings.__post_init__(self)
        self.refuse_empty_range(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowVeto(_RangeSettings):
    """A token outside the range drops its row."""

    name: ClassVar[str] = "row_veto"
    low: float = bounded(1e-4, at_least=0)
    high: float = bounded(float("inf"), at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqMaskTis(_RangeSettings):
    """A mean ratio outside the range drops its row; the others have the token ratio as weight."""

    name: ClassVar[str] = "seq_mask_tis"
    low: float = bounded(0.999, at_least=0)
    high: float = bounded(1.002, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opsm(CorrectionSettings):
    """Rows of a bad outcome that the policy has moved away from are dropped."""

    name: ClassVar[str] = "opsm"
    needs_recompute: ClassVar[bool] = False
    delta: float = bounded(0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescaled(CorrectionSettings):
    """The weights of all other corrections get a mean of 1 over the mini-batch; it comes last."""

    name: ClassVar[str] = "rescaled"
    needs_recompute: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPenalty(NamedSettings):
    """KL to a reference policy.

    Attributes:
        coefficient: factor of the KL, in units of the advantage per nat; with `target`, the first.
        target: mean KL in nats per trained token that the coefficient adapts to; None: no change.
        horizon: trajectories in which the coefficient can double or halve, roughly.
        place: in the loss, or subtracted from the advantages, or from the rewards of the tokens
            before a critic estimates the advantages.
    """

    option: ClassVar[str] = "--kl"
    coefficient: float = bounded(0.001, at_least=0)
    target: float | None = bounded(None, above=0)
    horizon: float = bounded(10_000.0, above=0)
    place: Literal["loss", "advantage", "reward"] = "loss"

    def __post_init__(self) -> None:
        NamedSettings.__post_init__(self)
        if self.target is not None and not self.coefficient > 0:
            raise self.refusal("coefficient=0 cannot adapt to a target")

    def require_critic(self, critic: object | None) -> None:
        """Raise InvalidConfigError if the KL is placed in rewards that no critic reads."""
        if self.place == "reward" and critic is None:
            message = "place=reward needs --critic: without one, use place=advantage or place=loss"
            raise self.refusal(message)


class K1(KlPenalty):
    """The difference of the log-probabilities."""

    __slots__ = ()
    name: ClassVar[str] = "k1"


class K2(KlPenalty):
    """Half of the squared difference."""

    __slots__ = ()
    name: ClassVar[str] = "k2"


class K3(KlPenalty):
    """exp(-x) - 1 + x of the difference x."""

    __slots__ = ()
    name: ClassVar[str] = "k3"


LOSSES: dict[str, type[LossSettings]] = {
    kind.name: kind
    for kind in (
        *(PpoClip, Gspo, Cispo, DecoupledPpo, Dppo, Sapo, Gmpo, ClipCov, KlCov, CrossEntropy),
    )
}
CORRECTIONS: dict[str, type[CorrectionSettings]] = {
    kind.name: kind for kind in (Tis, IcePop, Mis, RowVeto, SeqMaskTis, Opsm, Rescaled)
}
KL_ESTIMATES: dict[str, type[KlPenalty]] = {kind.name: kind for kind in (K1, K2, K3)}

Choice = TypeVar("Choice", bound=str)


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

    loss: LossSettings = PpoClip(clip_high=0.28, dual_clip=3.0)
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
        needing = [each.name for each in (self.loss, *self.corrections) if each.needs_recompute]
        if needing and self.proximal == "rollout":
            message = f"rollout: {needing[0]} compares rollout numbers with recomputed ones"
            raise InvalidConfigError("--proximal", message)
        names = [each.name for each in self.corrections]
        if "rescaled" in names and (names.index("rescaled") < len(names) - 1 or len(names) == 1):
            message = "rescaled: it scales the corrections before it, and comes last"
            raise InvalidConfigError("--correction", message)
        if self.denominators == "recount" and not names:
            message = "recount: no --correction drops a token"
            raise InvalidConfigError("--denominators", message)

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
