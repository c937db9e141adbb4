"""Settings of a trainer process. The command line has an option for each annotated field.

Without torch and numpy, so that the command line answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, get_args

import typer

from turnstream.errors import InvalidConfigError
from turnstream_server.models.spec import AdapterConfig, SmallModelSpec, layer_switches
from turnstream_server.options import Dump, Redis, Threads, split_address
from turnstream_server.trainer.combinations import check_critic, check_trainer
from turnstream_server.trainer.critic.config import CriticConfig
from turnstream_server.trainer.objectives.config import DEFAULT_LOSS, ObjectiveConfig
from turnstream_server.trainer.settings import (
    SCHEDULES,
    AdamSettings,
    Dtype,
    Layout,
    Parallel,
    ScheduleSettings,
    parse_arguments,
    parse_push,
    require_one_of,
)

_LEARNING_RATE: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """One trainer process.

    Attributes:
        policy: the first weights; a checkpoint in `folder` replaces them.
        small_model: the sizes of the first weights, in place of `policy`.
        push_api_key: bearer token for the servers of `push`; empty: none.

    Raises:
        InvalidConfigError: a setting cannot work; names the setting and its value.
    """

    run: Annotated[
        str, typer.Option("--run", help="Name of the run; without --preset it must exist.")
    ]
    folder: Annotated[Path, typer.Option(help="Receives checkpoints, weights and metrics.")]
    policy: Annotated[
        Path | None,
        typer.Option(help="Model folder, or a JSON file that describes a small model."),
    ] = None
    small_model: SmallModelSpec | None = None
    batcher_target: Annotated[
        str,
        typer.Option(
            "--batcher",
            metavar="HOST:PORT",
            help="Default: the batchers registered in the store.",
            show_default=False,
        ),
    ] = ""
    redis_url: Redis = ""
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="Default: 1e-6, or that of the preset.")
    ] = None
    beta1: Annotated[float, typer.Option(help="Decay of AdamW's first moment.")] = 0.9
    beta2: Annotated[float, typer.Option(help="Decay of AdamW's second moment.")] = 0.95
    eps: Annotated[float, typer.Option(help="AdamW's epsilon.")] = 1e-8
    weight_decay: Annotated[float, typer.Option(help="Decay of matrices.")] = 0.0
    max_grad_norm: Annotated[
        float, typer.Option(help="Larger gradients are scaled down to it; 0: never.")
    ] = 1.0
    schedule: Annotated[
        str, typer.Option(metavar="NAME", help="One of " + ", ".join(SCHEDULES) + ".")
    ] = "constant_with_warmup"
    warmup_updates: Annotated[int, typer.Option(min=0, help="Updates of linear warm-up.")] = 0
    schedule_updates: Annotated[
        int, typer.Option(min=0, help="Updates of the schedule, where it has an end.")
    ] = 0
    schedule_arguments: Annotated[
        str, typer.Option(metavar="JSON", help="Further arguments of transformers' schedule.")
    ] = ""
    layout: Annotated[
        str,
        typer.Option(
            metavar="padded|packed", help="Rows at one width, or one after another without padding."
        ),
    ] = "padded"
    parallel: Annotated[
        str,
        typer.Option(
            metavar="ddp|fsdp2",
            help="With torchrun: the whole model on each rank, or a shard of each weight.",
        ),
    ] = "ddp"
    dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|float32|bfloat16",
            help="Matrix products; auto: bfloat16 on CUDA. Weights stay float32.",
        ),
    ] = "auto"
    gradient_checkpointing: Annotated[
        bool, typer.Option(help="Compute layers again for the gradient: less memory, more time.")
    ] = False
    lora_rank: Annotated[
        int, typer.Option(min=0, help="Rank of a LoRA adapter; 0: train all weights.")
    ] = 0
    lora_alpha: Annotated[float, typer.Option(help="Updates are scaled by alpha / rank.")] = 32.0
    lora_layers: Annotated[
        str, typer.Option(metavar="NAMES", help="Some of attention, mlp, unembedding, with commas.")
    ] = "attention,mlp"
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature of the generators.")
    ] = 1.0
    epochs: Annotated[
        int, typer.Option(min=1, help="Passes over the mini-batches of each step.")
    ] = 1
    shuffle: Annotated[
        bool, typer.Option(help="Draw the order of each later pass from --seed, step and pass.")
    ] = False
    loss: Annotated[
        str,
        typer.Option(metavar="NAME[:KEY=VALUE,...]", help="Policy loss: docs/objectives.md."),
    ] = DEFAULT_LOSS
    correction: Annotated[
        list[str],
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="Weight of the policy loss for rollout mismatch; the weights of several multiply.",
        ),
    ] = field(default_factory=list[str])
    kl: Annotated[
        str | None,
        typer.Option(metavar="k1|k2|k3[:KEY=VALUE,...]", help="KL to the reference policy."),
    ] = None
    reference: Annotated[
        Path | None,
        typer.Option(help="Model folder of the reference policy. Default: the first policy."),
    ] = None
    entropy_bonus: Annotated[
        float | None,
        typer.Option(min=0, help="Factor of the mean entropy. Default: 0, or that of the preset."),
    ] = None
    proximal: Annotated[
        str | None,
        typer.Option(
            metavar="rollout|recompute",
            help="Source of the old log-probabilities. Default: rollout, or recompute if the loss "
            "or a correction needs it.",
        ),
    ] = None
    denominators: Annotated[
        str,
        typer.Option(
            metavar="shipped|recount",
            help="Divisors of the loss after a correction: all trained tokens, or those it keeps.",
        ),
    ] = "shipped"
    critic: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|policy[:KEY=VALUE,...]",
            help="Value model of a run with estimator=gae: docs/critic.md.",
            show_default=False,
        ),
    ] = None
    checkpoint_every: Annotated[int, typer.Option(min=1, help="In steps.")] = 10
    keep_checkpoints: Annotated[
        int, typer.Option(min=1, help="Number of complete checkpoints that are kept.")
    ] = 2
    max_steps: Annotated[int, typer.Option(min=0, help="0: until the run ends.")] = 0
    max_masked_share: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Stop above this share of tokens in masked trajectories.",
        ),
    ] = 1.0
    num_threads: Threads = 0
    seed: Annotated[int, typer.Option(help="Seed of training.")] = 0
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Longest wait for one batch, in seconds.")
    ] = 600.0
    dump_folder: Dump = None
    metrics_listen: Annotated[
        str,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve /metrics, /healthz and /readyz, on 127.0.0.1 by default; port 0: a free "
            "one. Default: TURNSTREAM_METRICS_LISTEN.",
            show_default=False,
        ),
    ] = ""
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write metrics to FOLDER/tensorboard.")
    ] = False
    wandb: Annotated[
        str,
        typer.Option(metavar="PROJECT", help="Log metrics to wandb.", show_default=False),
    ] = ""
    weights_listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve published weights over HTTP here, read-only; port 0: a free one. "
            "Default: generators read them from --folder.",
            show_default=False,
        ),
    ] = ""
    weights_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Address of published weights for generators. Default: --weights-listen.",
            show_default=False,
        ),
    ] = ""
    push: Annotated[
        list[str],
        typer.Option(
            metavar="vllm=URL|sglang=URL",
            help="Inference server that loads each version from --folder; can be repeated.",
            show_default=False,
        ),
    ] = field(default_factory=list)
    push_timeout_s: Annotated[
        float,
        typer.Option(
            "--push-timeout", min=1, help="Longest wait for an inference server, in seconds."
        ),
    ] = 300.0
    push_api_key: str = field(default="", repr=False)

    @property
    def adam(self) -> AdamSettings:
        """The settings of the optimizer."""
        rate = _LEARNING_RATE if self.learning_rate is None else self.learning_rate
        return AdamSettings(
            learning_rate=rate,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )

    @property
    def rate_schedule(self) -> ScheduleSettings:
        """The schedule of the learning rate."""
        return ScheduleSettings(
            name=self.schedule,
            warmup_updates=self.warmup_updates,
            total_updates=self.schedule_updates,
            arguments=parse_arguments(self.schedule_arguments),
        )

    @property
    def objective(self) -> ObjectiveConfig:
        """The settings of the objective; InvalidConfigError for those that cannot work."""
        return ObjectiveConfig.parse(
            loss=self.loss,
            corrections=self.correction,
            kl=self.kl,
            entropy_bonus=self.entropy_bonus or 0.0,
            proximal=self.proximal,
            denominators=self.denominators,
        )

    @property
    def critic_config(self) -> CriticConfig | None:
        """The settings of the critic; None without one."""
        return None if self.critic is None else CriticConfig.parse(self.critic)

    @property
    def shuffle_seed(self) -> int | None:
        """The seed of the order of later epochs; None keeps the order of the first."""
        return self.seed if self.shuffle else None

    @property
    def adapter(self) -> AdapterConfig | None:
        """The adapter that is trained; None for all weights."""
        if self.lora_rank == 0:
            return None
        switches = layer_switches(self.lora_layers)
        return AdapterConfig(rank=self.lora_rank, alpha=self.lora_alpha, seed=self.seed, **switches)

    def __post_init__(self) -> None:
        # Raise for invalid values.
        _ = self.adam, self.rate_schedule, self.adapter, self.critic_config
        check_critic(self.objective, has_critic=self.critic is not None)
        check_trainer(self)
        require_one_of("layout", self.layout, get_args(Layout))
        require_one_of("parallel", self.parallel, get_args(Parallel))
        require_one_of("dtype", self.dtype, get_args(Dtype))
        for target in self.push:
            parse_push(target)
        self._check_addresses()
        for name in ("epochs", "checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(name, f"{getattr(self, name)} is below 1")

    def _check_addresses(self) -> None:
        if self.weights_listen:
            split_address(self.weights_listen, option="--weights-listen")
        if self.metrics_listen:
            split_address(self.metrics_listen, option="--metrics-listen", default_host="127.0.0.1")
