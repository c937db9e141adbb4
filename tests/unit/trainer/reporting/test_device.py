from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from turnstream_server.trainer.reporting.timing import (
    DeviceUse,
    model_shape,
    peak_flops,
    training_flops,
)


def make_model(*, is_tied: bool) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=is_tied,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("is_tied", [False, True])
def test_flops_of_a_step_are_those_that_torch_counts(is_tied: bool) -> None:
    model = make_model(is_tied=is_tied)
    lengths = (5, 40)
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            model(torch.zeros(1, length, dtype=torch.long)).logits.sum().backward()

    counted = training_flops(model_shape(model), sum(lengths), sum(length**2 for length in lengths))

    # Norms are in the parameters, and no matrix products; the first layer has no input gradient.
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.02)
    use = DeviceUse(model).lap(num_tokens=10, squared_lengths=100, step_s=1.0)
    assert use == {"mfu": None, "peak_gpu_bytes": None}  # without CUDA


def test_shape_has_the_width_of_the_heads_not_of_the_model() -> None:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )

    shape = model_shape(AutoModelForCausalLM.from_config(config))

    assert (shape.num_layers, shape.attention_width) == (3, 64)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090X", None),
        ("", None),
    ],
)
def test_peak_of_a_device_is_found_by_whole_words(device: str, peak: float | None) -> None:
    assert peak_flops(device) == peak


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_memory_is_measured_step_by_step() -> None:
    use = DeviceUse(make_model(is_tied=False).to("cuda"))  # pyright: ignore[reportArgumentType]
    large = torch.zeros(1 << 28, device="cuda")
    del large
    first = use.lap(num_tokens=10, squared_lengths=100, step_s=1.0)["peak_gpu_bytes"]
    second = use.lap(num_tokens=10, squared_lengths=100, step_s=1.0)["peak_gpu_bytes"]

    assert first is not None
    assert second is not None
    assert first >= (1 << 30) > second
