"""Settings of a trainer process: plain values, so that a command line can build them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from turnstream.errors import InvalidConfigError
from turnstream_server.models.spec import PolicySource


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW.

    Attributes:
        learning_rate: constant after `num_warmup_updates` optimizer updates of linear growth.
        max_grad_norm: gradients of a larger global norm are scaled down to it.
    """

    learning_rate: float = 1e-6
    num_warmup_updates: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """The clipped policy gradient. The run's `aggregation` decides the average of token losses.

    Attributes:
        clip_low, clip_high: the ratio current / behaviour is clipped to [1 - low, 1 + high].
        dual_clip: bound of the loss where the advantage is negative; 0 turns it off.
        temperature: sampling temperature of the generators, for log-probabilities.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise InvalidConfigError("temperature", f"{self.temperature} is not above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """One trainer process.

    Attributes:
        run: name of the run.
        batcher_target: gRPC address of a batcher, "host:port".
        policy: the first weights; a checkpoint in `folder` replaces them.
        folder: receives `checkpoints/`, `weights/` and `metrics.jsonl`.
        checkpoint_every: steps between checkpoints; one is also made at the end of the run.
        max_steps: stops after this step; 0 trains until the run ends.
        num_threads: threads of torch; 0 takes torch's default.
        seed: seed of all random numbers in training.
        timeout_s: longest wait for one batch.
        dump_folder: receives the rows of every trained mini-batch; None writes none.
    """

    run: str
    batcher_target: str
    policy: PolicySource
    folder: Path
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    checkpoint_every: int = 10
    max_steps: int = 0
    num_threads: int = 0
    seed: int = 0
    timeout_s: float = 600.0
    dump_folder: Path | None = None

    def __post_init__(self) -> None:
        if self.checkpoint_every < 1:
            raise InvalidConfigError("checkpoint_every", f"{self.checkpoint_every} is not above 0")
