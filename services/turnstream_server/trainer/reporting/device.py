"""The use of the device by a step: MFU and memory, on CUDA alone."""

from __future__ import annotations

from typing import cast

import torch
from transformers import PreTrainedModel

from turnstream_server.trainer.reporting.flops import ModelShape, peak_flops, training_flops


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
