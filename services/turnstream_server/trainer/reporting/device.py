"""The use of the device by a step: MFU and memory, on CUDA alone.

Model FLOPs utilization (MFU, arXiv:2204.02311) is the share of the peak rate that the model itself
uses. Padding and recomputation add nothing to it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, cast

import torch
from transformers import PreTrainedModel

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
