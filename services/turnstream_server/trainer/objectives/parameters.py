"""Losses, corrections and KL estimates by their name, each a dataclass of its parameters.

The parameters and defaults of a loss or a correction are those of its function in
`turnstream.worker`. A test compares them. Bounds of one parameter are here, the rules over several
in `turnstream_server.trainer.combinations`. Without torch, so that the command line answers at
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from turnstream_server.trainer.objectives.named_settings import NamedSettings, bounded

Level = Literal["token", "sequence", "geometric"]

_NO_LIMIT: Final = float("inf")

_AGREE: Final = "a ratio of 1, where trainer and generator agree, keeps its weight"


def _least(default: float | None) -> Any:
    """Return a field of the smallest ratio that a correction keeps."""
    return bounded(default, at_least=0, at_most=1, reason=_AGREE)


def _largest(default: float | None) -> Any:
    """Return a field of the largest ratio that a correction keeps."""
    return bounded(default, at_least=1, at_most=_NO_LIMIT, reason=_AGREE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings(NamedSettings):
    """Parameters of a policy loss.

    Attributes:
        needs_recompute: it compares the generator's log-probabilities with recomputed ones.
        corrects_ratio: the probabilities of the generator are in it as a denominator.
        reads_old: it reads the old log-probabilities.
        reads_advantages: it reads the advantages.
    """

    option: ClassVar[str] = "--loss"
    needs_recompute: ClassVar[bool] = False
    corrects_ratio: ClassVar[bool] = False
    reads_old: ClassVar[bool] = True
    reads_advantages: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoClip(LossSettings):
    """The clipped loss of PPO."""

    name: ClassVar[str] = "ppo_clip"
    clip_low: float = bounded(0.2, at_least=0, at_most=1)
    clip_high: float = bounded(0.2, at_least=0, at_most=_NO_LIMIT)
    dual_clip: float | None = bounded(None, above=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo(LossSettings):
    """The clipped loss with one ratio per row."""

    name: ClassVar[str] = "gspo"
    clip_low: float = bounded(3e-4, at_least=0, at_most=1)
    clip_high: float = bounded(4e-4, at_least=0, at_most=_NO_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo(LossSettings):
    """The policy gradient with a clipped ratio as weight."""

    name: ClassVar[str] = "cispo"
    clip_low: float = bounded(1.0, at_least=0, at_most=1)
    clip_high: float = bounded(0.28, at_least=0, at_most=_NO_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPpo(LossSettings):
    """The clipped loss against recomputed log-probabilities, weighted by old / behaviour."""

    name: ClassVar[str] = "decoupled_ppo"
    needs_recompute: ClassVar[bool] = True
    corrects_ratio: ClassVar[bool] = True
    clip_low: float = bounded(0.2, at_least=0, at_most=1)
    clip_high: float = bounded(0.2, at_least=0, at_most=_NO_LIMIT)
    dual_clip: float | None = bounded(None, above=1)
    behaviour_cap: float = _largest(5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dppo(LossSettings):
    """The policy gradient with a mask by divergence from the behaviour policy."""

    name: ClassVar[str] = "dppo"
    corrects_ratio: ClassVar[bool] = True
    reads_old: ClassVar[bool] = False
    divergence: Literal["tv", "kl"] = "tv"
    threshold: float | None = bounded(None, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sapo(LossSettings):
    """The policy gradient with a soft gate on the ratio."""

    name: ClassVar[str] = "sapo"
    temperature_positive: float = bounded(1.0, at_least=0.01, at_most=1000)
    temperature_negative: float = bounded(1.05, at_least=0.01, at_most=1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gmpo(LossSettings):
    """One ratio per row: the geometric mean of clipped ratios."""

    name: ClassVar[str] = "gmpo"
    clip_low: float = bounded(0.4, at_least=0)
    clip_high: float = bounded(0.4, at_least=0, at_most=_NO_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCov(LossSettings):
    """`ppo_clip` without some tokens of high covariance.

    Attributes:
        share: tokens without a gradient, as a share of the trained tokens; at least one token.
        low, high: range of the covariances that a token is chosen from.
    """

    name: ClassVar[str] = "clip_cov"
    clip_low: float = bounded(0.2, at_least=0, at_most=1)
    clip_high: float = bounded(0.2, at_least=0, at_most=_NO_LIMIT)
    share: float = bounded(2e-4, above=0, at_most=1)
    low: float = bounded(1.0)
    high: float = bounded(5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCov(LossSettings):
    """The policy gradient with a KL penalty on the tokens of the highest covariance.

    Attributes:
        share: tokens with a penalty, as a share of the trained tokens; at least one token.
    """

    name: ClassVar[str] = "kl_cov"
    coefficient: float = bounded(1.0, above=0)
    share: float = bounded(2e-4, above=0, at_most=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy(LossSettings):
    """Supervised training; rewards and advantages have no effect."""

    name: ClassVar[str] = "cross_entropy"
    reads_old: ClassVar[bool] = False
    reads_advantages: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings(NamedSettings):
    """Parameters of a correction. Its weight is 1 where trainer and generator agree.

    Attributes:
        needs_recompute: it compares the generator's log-probabilities with recomputed ones.
        corrects_ratio: its weight is a ratio of trainer and generator, not 0 or 1.
        reads_advantages: it reads the advantages.
    """

    option: ClassVar[str] = "--correction"
    needs_recompute: ClassVar[bool] = True
    corrects_ratio: ClassVar[bool] = False
    reads_advantages: ClassVar[bool] = False

    @property
    def kept_range(self) -> tuple[float, float]:
        """The smallest and the largest ratio that it does not change to a bound or to 0."""
        return 0.0, _NO_LIMIT

    @property
    def drops_tokens(self) -> bool:
        """Whether its weight can be 0."""
        return self.kept_range != (0.0, _NO_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tis(CorrectionSettings):
    """Truncated importance sampling."""

    name: ClassVar[str] = "tis"
    corrects_ratio: ClassVar[bool] = True
    level: Level = "token"
    cap: float = _largest(2.0)
    floor: float = _least(0.0)

    @property
    def kept_range(self) -> tuple[float, float]:
        """Floor and cap."""
        return self.floor, self.cap

    @property
    def drops_tokens(self) -> bool:
        """No weight is 0: exponents have a limit."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _RangeSettings(CorrectionSettings):
    """Parameters of a correction that keeps a range of ratios."""

    low: float = _least(0.0)
    high: float = _largest(_NO_LIMIT)

    @property
    def kept_range(self) -> tuple[float, float]:
        """The range."""
        return self.low, self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class IcePop(_RangeSettings):
    """Ratios outside the range drop their token."""

    name: ClassVar[str] = "icepop"
    corrects_ratio: ClassVar[bool] = True
    low: float = _least(0.5)
    high: float = _largest(5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mis(CorrectionSettings):
    """Masked importance sampling, by token or by row."""

    name: ClassVar[str] = "mis"
    level: Level = "token"
    low: float | None = _least(None)
    high: float | None = _largest(None)
    veto_below: float = _least(1e-4)

    @property
    def kept_range(self) -> tuple[float, float]:
        """The range, with the defaults of the level."""
        low, high = MIS_RANGES[self.level]
        return low if self.low is None else self.low, high if self.high is None else self.high

    @property
    def drops_tokens(self) -> bool:
        """Range or veto drop some."""
        return True


MIS_RANGES: Final[dict[Level, tuple[float, float]]] = {
    "token": (0.5, 2.0),
    "sequence": (0.5, 2.0),
    "geometric": (0.9999, 1.0001),
}
"""The ratios that `mis` keeps by default, by its level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowVeto(_RangeSettings):
    """A token outside the range drops its row."""

    name: ClassVar[str] = "row_veto"
    low: float = _least(1e-4)
    high: float = _largest(_NO_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqMaskTis(_RangeSettings):
    """A geometric mean ratio outside the range drops its row; others weigh by the token ratio."""

    name: ClassVar[str] = "seq_mask_tis"
    corrects_ratio: ClassVar[bool] = True
    low: float = _least(0.999)
    high: float = _largest(1.002)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opsm(CorrectionSettings):
    """Rows of a bad outcome that the policy has moved away from are dropped."""

    name: ClassVar[str] = "opsm"
    needs_recompute: ClassVar[bool] = False
    reads_advantages: ClassVar[bool] = True
    delta: float = bounded(0.1, at_least=0)

    @property
    def drops_tokens(self) -> bool:
        """Rows above `delta` have a weight of 0."""
        return True


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
            0 in the loss measures the KL alone.
        target: mean KL in nats per trained token that the coefficient adapts to; None: no change.
        horizon: trained trajectories in which the coefficient changes by at most a fifth, roughly.
        place: in the loss, or subtracted from the advantages, or from the rewards of the tokens
            before a critic estimates the advantages.
    """

    option: ClassVar[str] = "--kl"
    coefficient: float = bounded(0.001, at_least=0)
    target: float | None = bounded(None, above=0)
    horizon: float = bounded(10_000.0, above=0)
    place: Literal["loss", "advantage", "reward"] = "loss"


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
