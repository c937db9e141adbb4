"""The wall and CPU seconds of a step, by part, and its use of the device: MFU and memory, on CUDA.

Model FLOPs utilization (MFU, arXiv:2204.02311) is the share of the peak rate that the model itself
uses. Padding and recomputation add nothing to it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple, cast

import torch
from transformers import PreTrainedModel

PARTS: Final = ("wait", "forward_backward", "optimizer", "publish", "checkpoint")
"""The measured parts of a step, in the order of `metrics.jsonl`."""


class StepClock:
    """Measures steps: one ends, and the next begins, with each call of `lap`.

    Args:
        wall: returns seconds; any origin.
        cpu: returns CPU seconds of the process.
    """

    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._wall, self._cpu = wall, cpu
        self._created_s = wall()
        self.restart()

    def restart(self) -> None:
        """Begin a step now; drop the time since the last one."""
        self._began_s, self._began_cpu_s = self._wall(), self._cpu()
        self._parts_s: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of the block to a part of the step."""
        began_s = self._wall()
        try:
            yield
        finally:
            self.add(part, self._wall() - began_s)

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to a part of the step; KeyError for one that is not in `PARTS`."""
        self._parts_s[part] += seconds

    def move(self, seconds: float, *, source: str, target: str) -> None:
        """Move seconds from one part of the step to another, which was measured inside it."""
        self.add(source, -seconds)
        self.add(target, seconds)

    def lap(self) -> dict[str, float]:
        """Return the times of the step by metric, and begin the next step.

        The measured parts and `other_s` sum to `step_s`.
        """
        now_s = self._wall()
        times = {
            **breakdown(now_s - self._began_s, self._parts_s),
            "cpu_s": self._cpu() - self._began_cpu_s,
            "elapsed_s": now_s - self._created_s,
        }
        self.restart()
        return times


def breakdown(step_s: float, parts_s: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of a step by metric, with the rest of its wall time as `other_s`.

    >>> breakdown(8.0, {"wait": 1.0, "publish": 4.0})
    {'step_s': 8.0, 'wait_s': 1.0, 'publish_s': 4.0, 'other_s': 3.0}
    """
    parts = {f"{part}_s": seconds for part, seconds in parts_s.items()}
    return {"step_s": step_s, **parts, "other_s": step_s - sum(parts_s.values())}


def rates(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the tokens per second of a step; 0 where a time is 0.

    Args:
        metrics: `num_tokens`, `num_trained_tokens`, `step_s` and `cpu_s` of the step.

    >>> rates({"num_tokens": 600, "num_trained_tokens": 200, "step_s": 2.0, "cpu_s": 4.0})
    {'trained_tokens_per_s': 100.0, 'tokens_per_s': 300.0, 'trained_tokens_per_cpu_s': 50.0}
    """
    trained, step_s = metrics["num_trained_tokens"], metrics["step_s"]
    return {
        "trained_tokens_per_s": _ratio(trained, step_s),
        "tokens_per_s": _ratio(metrics["num_tokens"], step_s),
        "trained_tokens_per_cpu_s": _ratio(trained, metrics["cpu_s"]),
    }


def _ratio(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


_PEAK_FLOPS: Final = {
    "A10": 125e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H20": 148e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "H800": 989e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165.2e12,
    "RTX A6000": 154.8e12,
}
"""FLOP/s in bfloat16 without sparsity, from the data sheets, by words of the device's name."""


class DeviceUse:
    """Measures the use of a model's device, step by step.

    Each step has its own peak of memory. Model parallelism is not counted: the model is
    on one device.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._shape = model_shape(model)
        self._device = model.device
        self._is_cuda = self._device.type == "cuda"
        name = torch.cuda.get_device_name(self._device) if self._is_cuda else ""
        self._peak_flops = peak_flops(name)

    def lap(
        self, *, num_tokens: int, squared_lengths: int, step_s: float
    ) -> dict[str, float | None]:
        """Return `mfu` and `peak_gpu_bytes` of a step; null without CUDA.

        `mfu` is null on a device of unknown peak too. The first arguments are those of
        `training_flops`, over all passes of the step; `step_s` is its wall time.
        """
        if not self._is_cuda:
            return {"mfu": None, "peak_gpu_bytes": None}
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        flops = training_flops(self._shape, num_tokens, squared_lengths)
        mfu = None if self._peak_flops is None else flops / (step_s * self._peak_flops)
        return {"mfu": mfu, "peak_gpu_bytes": peak_bytes}


def model_shape(model: PreTrainedModel) -> ModelShape:
    """Return the sizes of a Hugging Face model.

    A table of input embeddings counts where it is also the output projection.
    """
    table = cast(torch.Tensor, model.get_input_embeddings().weight)
    output = model.get_output_embeddings()
    is_tied = output is not None and output.weight is table
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    total = sum(each.numel() for each in model.parameters())
    return ModelShape(
        num_parameters=total - (0 if is_tied else table.numel()),
        num_layers=config.num_hidden_layers,
        attention_width=config.num_attention_heads * width,
    )


class ModelShape(NamedTuple):
    """The sizes of a model that its FLOPs depend on.

    Attributes:
        num_parameters: those of matrix products, so without a table of input embeddings.
        num_layers: layers with attention.
        attention_width: heads times width of a head.
    """

    num_parameters: int
    num_layers: int
    attention_width: int


def training_flops(shape: ModelShape, num_tokens: float, squared_lengths: float) -> float:
    """Return the FLOPs of forward and backward passes over rows, without padding.

    Each token costs 6 per parameter. In each layer, attention adds 12 per token, per position of
    its row and per element of the attention width (arXiv:2204.02311, appendix B). The causal mask
    is not deducted, as usual. `num_tokens` and `squared_lengths` are sums over the rows, of their
    lengths and of the squares of these.

    >>> training_flops(ModelShape(1_000, 2, 8), 10, 52)
    69984.0
    """
    attention = 12 * shape.num_layers * shape.attention_width * squared_lengths
    return float(6 * shape.num_parameters * num_tokens + attention)


def peak_flops(device: str) -> float | None:
    """Return the peak FLOP/s of a device by its name in CUDA; None if it is not in the table.

    The entry with the most words in the name counts.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA H100 PCIe")
    (989000000000000.0, 756000000000000.0)
    >>> peak_flops("NVIDIA GeForce GTX 1080") is None
    True
    """
    words = set(re.split(r"[\s-]+", device))
    known = [name for name in _PEAK_FLOPS if words.issuperset(name.split())]
    return _PEAK_FLOPS[max(known, key=lambda name: len(name.split()))] if known else None
