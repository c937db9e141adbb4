"""Settings of a critic. Without torch, so that the command line answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal

from turnstream.errors import InvalidConfigError
from turnstream_server.trainer.combinations import check_gae
from turnstream_server.trainer.objectives.named_settings import (
    NamedSettings,
    bounded,
    parse_parameters,
)

_OPTION: Final = "--critic"

FIRST_POLICY: Final = "policy"
"""Source of a critic that begins with the layers of the first policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeSettings(NamedSettings):
    """Parameters of a critic and of its advantages.

    Attributes:
        gamma: discount of later rewards.
        lam: lambda of generalised advantage estimation.
        value_lam: lambda of the returns that the critic learns; None for `lam`.
        length_alpha: alpha of the lambda 1 - 1 / (alpha * trained tokens) of the advantages, at
            least 0, in place of `lam` (VAPO, arXiv:2504.05118); None: no such lambda.
        whiten: whether the advantages are whitened over the trained tokens of the step.
        value_clip: largest change of a value in a step that lowers its loss, in units of reward;
            None: no limit.
        learning_rate: constant rate of the critic's optimizer.
    """

    option: ClassVar[str] = _OPTION
    name: ClassVar[str] = "critic"
    gamma: float = bounded(1.0, at_least=0, at_most=1)
    lam: float = bounded(0.95, at_least=0, at_most=1)
    value_lam: float | None = bounded(None, at_least=0, at_most=1)
    length_alpha: float | None = bounded(None, above=0)
    whiten: Literal["true", "false"] = "true"
    value_clip: float | None = bounded(0.2, above=0)
    learning_rate: float = bounded(1e-5, above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """One critic. `str` returns the text that a user types.

    Attributes:
        source: model folder that the critic begins with; None for the first policy.
        gae: its parameters.
    """

    source: Path | None
    gae: GaeSettings

    def __post_init__(self) -> None:
        check_gae(self.gae)

    @classmethod
    def parse(cls, text: str) -> CriticConfig:
        """Return the critic of `FOLDER|policy[:KEY=VALUE,...]`.

        >>> str(CriticConfig.parse("policy:lam=0.9,value_clip=none"))
        'policy:lam=0.9,value_clip=none'
        >>> CriticConfig.parse("models/a:b").source
        PosixPath('models/a:b')

        Raises:
            InvalidConfigError: no source is named, or a parameter or a value is not known.
        """
        source, _, words = text.rpartition(":")
        if "=" not in words:
            source, words = text, ""
        if not source:
            raise InvalidConfigError(_OPTION, f"{text!r} names neither a folder nor {FIRST_POLICY}")
        folder = None if source == FIRST_POLICY else Path(source)
        return cls(source=folder, gae=parse_parameters(words, GaeSettings, option=_OPTION))

    def __str__(self) -> str:
        _, _, words = str(self.gae).partition(":")
        source = FIRST_POLICY if self.source is None else str(self.source)
        return f"{source}:{words}" if words else source


def require_critic_for(estimator: str, critic: CriticConfig | None) -> None:
    """Raise InvalidConfigError unless a critic is there exactly for a run that needs one."""
    if estimator == "gae" and critic is None:
        message = "none, and the run has estimator='gae': start the trainer with --critic policy"
        raise InvalidConfigError(_OPTION, message)
    if estimator != "gae" and critic is not None:
        raise InvalidConfigError(
            _OPTION,
            f"{critic}, and the run has estimator={estimator!r}: create one with "
            "`turnstream run create NAME --set estimator=gae`, or start without --critic",
        )
