"""The metrics of a training, each declared once.

A metric is a key of `metrics.jsonl`, a metric of Prometheus, a tag of TensorBoard, a key of wandb,
and a row of docs/metrics.md. A new one is one line of `METRICS`; `tools/metrics_page.py` writes the
table of the page.

Without torch, so that a command can read metrics at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from turnstream_server.trainer.objectives.parameters import CORRECTIONS

Kind = Literal["gauge", "counter", ""]


class Metric(NamedTuple):
    """One metric of a step.

    Attributes:
        name: key of `metrics.jsonl`.
        kind: type in Prometheus. A "gauge" is the value of the newest step, a "counter" the sum
            over the steps of this process. "" is for a value that is no number: JSON lines alone.
        unit: "tokens", for example; "" for a pure number.
        sentence: meaning, for people.
        is_optional: whether it may be absent or null.
        group: section of a dashboard.
    """

    name: str
    kind: Kind
    unit: str
    sentence: str
    is_optional: bool = False
    group: str = ""

    @property
    def tag(self) -> str:
        """Tag of TensorBoard and key of wandb.

        >>> Metric("kl", "gauge", "nats", "", group="policy").tag
        'policy/kl'
        """
        return f"{self.group}/{self.name}"

    @property
    def prometheus_name(self) -> str:
        """Name in Prometheus, with seconds in full and `_total` for a counter.

        >>> Metric("num_tokens", "counter", "tokens", "").prometheus_name
        'turnstream_trainer_tokens_total'
        >>> Metric("wait_s", "counter", "s", "").prometheus_name
        'turnstream_trainer_wait_seconds_total'
        >>> Metric("tokens_per_s", "gauge", "tokens/s", "").prometheus_name
        'turnstream_trainer_tokens_per_second'
        """
        name = re.sub(r"(_per(_cpu)?)_s$", r"\1_second", self.name.removeprefix("num_"))
        name = re.sub(r"_s$", "_seconds", name)
        return f"turnstream_trainer_{name}{'_total' if self.kind == 'counter' else ''}"


def _group(group: str, *metrics: Metric) -> Iterator[Metric]:
    return (metric._replace(group=group) for metric in metrics)


def _correction(name: str) -> tuple[Metric, Metric]:
    """Return the metrics of a correction: its mean weight, and its share of the weight 0."""
    return (
        Metric(f"weight_{name}", "gauge", "", f"Mean weight of `{name}`.", is_optional=True),
        Metric(f"masked_share_{name}", "gauge", "", f"Share of weight 0 of `{name}`.", True),
    )


METRICS: Final = (
    *_group(
        "progress",
        Metric("step", "gauge", "", "Number of the batch, from 1."),
        Metric("version", "gauge", "", "Policy version of the weights after the step."),
        Metric("num_updates", "gauge", "updates", "Optimizer updates since the start of the run."),
        Metric("elapsed_s", "gauge", "s", "Time since the start of the trainer."),
    ),
    *_group(
        "policy",
        Metric("reward_mean", "gauge", "", "Mean reward of a trajectory.", is_optional=True),
        Metric("loss", "gauge", "", "Mean loss of the updates.", is_optional=True),
        Metric("ratio", "gauge", "", "Mean of current / old probability."),
        Metric("kl", "gauge", "nats", "Estimate of KL(behaviour || current)."),
        Metric("clipped_share", "gauge", "", "Share of the ratios outside the clip range."),
        Metric("clipped_low_share", "gauge", "", "Share of the ratios below the clip range."),
        Metric("clipped_high_share", "gauge", "", "Share of the ratios above the clip range."),
        Metric("logprob", "gauge", "nats", "Mean log-probability before the update."),
        Metric("entropy", "gauge", "nats", "Mean entropy of the policy.", is_optional=True),
        Metric("kl_reference", "gauge", "nats", "KL to the reference.", is_optional=True),
        Metric("kl_coefficient", "gauge", "", "Factor of the KL to the reference.", True),
        Metric("selected_share", "gauge", "", "Share of tokens that the loss selected.", True),
        Metric("logprob_gap", "gauge", "nats", "Mean of |old - behaviour log-probability|.", True),
        Metric("logprob_gap_max", "gauge", "nats", "Maximum of the same difference.", True),
    ),
    *_group("corrections", *(metric for name in CORRECTIONS for metric in _correction(name))),
    *_group(
        "critic",
        Metric("value_loss", "gauge", "", "Mean loss of the critic.", is_optional=True),
        Metric(
            "value_clipped_share",
            "gauge",
            "",
            "Share of the values that moved further than `value_clip`.",
            is_optional=True,
        ),
        Metric(
            "explained_variance",
            "gauge",
            "",
            "Share of the variance of the returns that the values explain.",
            is_optional=True,
        ),
        Metric("value_mean", "gauge", "", "Mean value before the first update.", True),
        Metric("return_mean", "gauge", "", "Mean return that the critic learns.", True),
        Metric("critic_gradient_norm", "gauge", "", "Largest gradient norm of the critic.", True),
        Metric(
            "total_skipped_critic_updates",
            "gauge",
            "updates",
            "Skipped updates of the critic in the run.",
            is_optional=True,
        ),
    ),
    *_group(
        "optimizer",
        Metric("gradient_norm", "gauge", "", "Largest gradient norm, before clipping.", True),
        Metric("learning_rate", "gauge", "", "Learning rate of the last update."),
        Metric("total_skipped_updates", "gauge", "updates", "Skipped updates of the run."),
        Metric("skip_reasons", "", "", "Causes of the skipped updates of the step."),
        Metric("num_skipped_updates", "counter", "updates", "Updates that were skipped."),
    ),
    *_group(
        "data",
        Metric("num_groups", "counter", "groups", "Groups of the batch."),
        Metric("num_trajectories", "counter", "trajectories", "Trajectories of the batch."),
        Metric("num_rows", "counter", "rows", "Rows, without inert ones."),
        Metric("num_inert_rows", "counter", "rows", "Rows that fill up a share, untrained."),
        Metric("num_recomputed_rows", "counter", "rows", "Rows that lack log-probabilities."),
        Metric("num_tokens", "counter", "tokens", "Tokens of the rows, without padding."),
        Metric("num_trained_tokens", "counter", "tokens", "Tokens in the loss."),
        Metric(
            "padding_share",
            "gauge",
            "",
            "Share of padding among the positions of the layout in use.",
        ),
        Metric("masked_share", "gauge", "", "Share of the tokens in masked trajectories."),
        Metric("merge_ratio", "gauge", "", "Tokens of the separate turns / tokens of the rows."),
        Metric("staleness", "gauge", "versions", "Age of the oldest trained token.", True),
        Metric("oldest_version", "gauge", "", "Oldest version of a trained token.", True),
        Metric("newest_version", "gauge", "", "Newest version of a trained token.", True),
        Metric("figures", "", "", "Tags and metrics of the trajectories.", is_optional=True),
    ),
    *_group(
        "weights",
        Metric("num_servers_behind", "gauge", "servers", "Servers without the newest weights."),
        Metric("num_failed_pushes", "gauge", "pushes", "Failed pushes since the trainer started."),
    ),
    *_group(
        "time",
        Metric("step_s", "counter", "s", "Wall time since the step before: the parts below."),
        Metric("wait_s", "counter", "s", "Waiting for data."),
        Metric("forward_backward_s", "counter", "s", "Forward and backward passes."),
        Metric("optimizer_s", "counter", "s", "Clipping of gradients, and the optimizer."),
        Metric("publish_s", "counter", "s", "Writing and announcing the weights."),
        Metric("checkpoint_s", "counter", "s", "Checkpoint between the step before and this one."),
        Metric("other_s", "counter", "s", "Rest of the wall time."),
        Metric("cpu_s", "counter", "s", "CPU time of the process, of all its threads."),
        Metric("trained_tokens_per_s", "gauge", "tokens/s", "Tokens in the loss / wall time."),
        Metric("tokens_per_s", "gauge", "tokens/s", "Tokens of the rows / wall time."),
        Metric("trained_tokens_per_cpu_s", "gauge", "tokens/s", "Tokens in the loss / CPU time."),
    ),
    *_group(
        "device",
        Metric("mfu", "gauge", "", "Share of the peak FLOP/s that the model uses, on CUDA.", True),
        Metric("peak_gpu_bytes", "gauge", "bytes", "Most memory of tensors on the GPU.", True),
    ),
)
"""Every metric, in the order of the page."""

BY_NAME: Final = {metric.name: metric for metric in METRICS}


def declared(name: str) -> Metric | None:
    """Return the metric of this name; None if there is none.

    The second correction "tis" of an objective is "tis_2", with the declaration of the first.

    >>> metric = declared("weight_tis_2")
    >>> metric and metric.tag
    'corrections/weight_tis_2'
    """
    found = BY_NAME.get(name) or BY_NAME.get(re.sub(r"_\d+$", "", name))
    return None if found is None else found._replace(name=name)


def numbers(metrics: Mapping[str, Any]) -> Iterator[tuple[Metric, float]]:
    """Yield the declared metrics of a step that are numbers, each with its value.

    >>> [(metric.name, value) for metric, value in numbers({"kl": 0.5, "mfu": None})]
    [('kl', 0.5)]
    """
    for name, value in metrics.items():
        metric = declared(name)
        if metric is not None and metric.kind and isinstance(value, int | float):
            yield metric, float(value)


def undeclared(names: Iterable[str]) -> list[str]:
    """Return the names that no metric has, sorted.

    >>> undeclared(["kl", "kk"])
    ['kk']
    """
    return sorted(name for name in names if declared(name) is None)
