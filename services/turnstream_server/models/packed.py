"""Forward passes over packed rows: one sequence for all rows, with attention within each row.

`enable_packing` chooses the attention once for a model, by a trial. After it the model takes the
arguments that `packed_inputs` returns, and still all others.

Shapes: N slots of all rows, L slots of a row, H heads, D size of a head, V vocabulary.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.import_utils import is_flash_attn_2_available

from turnstream.errors import InvalidConfigError

logger = logging.getLogger(__name__)

_BY_ROW: Final = "turnstream_by_row"
_FLASH: Final = "flash_attention_2"

_TOLERANCE: Final = {torch.float32: 1e-5, torch.float64: 1e-5}
"""Largest difference in a trial, as a share of the largest logit. Other dtypes have `_COARSE`."""

_COARSE: Final = 2e-2


class PackedRows(NamedTuple):
    """Rows one after another: int64 tokens and positions, (N,), and where each row begins.

    `bounds` is on the host, and one longer than the rows: it ends with N.
    """

    input_ids_N: Tensor
    position_ids_N: Tensor
    bounds: tuple[int, ...]


def packed_inputs(model: PreTrainedModel, rows: PackedRows) -> dict[str, Any]:
    """Return the arguments of the model for a forward pass over packed rows."""
    inputs: dict[str, Any] = {
        "input_ids": rows.input_ids_N[None],
        "position_ids": rows.position_ids_N[None],
        "use_cache": False,
    }
    match model.config._attn_implementation:
        case "turnstream_by_row":
            # transformers makes no mask of N * N values where it gets one of four dimensions.
            unused = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=rows.input_ids_N.device)
            inputs |= {"row_bounds": rows.bounds, "attention_mask": unused}
        case "flash_attention_2":
            starts = torch.tensor(rows.bounds, dtype=torch.int32, device=rows.input_ids_N.device)
            longest = max(b - a for a, b in itertools.pairwise(rows.bounds))
            inputs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
            inputs |= {"max_length_q": longest, "max_length_k": longest}
        case _:
            pass  # transformers makes a mask from the positions
    return inputs


def enable_packing(model: PreTrainedModel) -> None:
    """Choose the attention of a model for packed rows: the first one that passes a trial.

    Call it under the autocast of later passes, if there is one.

    - FlashAttention 2, on a CUDA device that has the package, for 16-bit weights.
    - One call of `scaled_dot_product_attention` for each row.
    - The model's own attention, with a mask of N * N values.

    Raises:
        InvalidConfigError: a row sees other rows with each of them.
    """
    own = model.config._attn_implementation or "eager"
    expected = _trial_alone(model)
    for name in [*_candidates(model), own]:
        try:
            model.set_attn_implementation(name)
            if _passes_trial(model, expected):
                logger.info("packed rows have the attention %s", name)
                return
        except (ValueError, TypeError, RuntimeError, ImportError) as error:
            logger.debug("attention %s: %s", name, error)
    model.set_attn_implementation(own)
    message = f"packed rows of a {model.config.model_type} model see one another; use padded"
    raise InvalidConfigError("layout", message)


def _candidates(model: PreTrainedModel) -> Iterator[str]:
    is_half = _dtype(model) in (torch.float16, torch.bfloat16)
    if model.device.type == "cuda" and is_half and is_flash_attn_2_available():
        yield _FLASH
    yield _BY_ROW


def _by_row_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    row_bounds: Sequence[int] | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Return causal attention within each row, (1, N, H, D), of inputs in (1, H, N, D)."""
    if row_bounds is None:
        settings["sliding_window"] = sliding_window
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    results: list[Tensor] = []
    for begin, end in itertools.pairwise(row_bounds):
        q, k, v = (each[:, :, begin:end] for each in (query, key, value))
        mask = _window_mask(end - begin, sliding_window, device=query.device)
        results.append(sdpa_attention_forward(module, q, k, v, mask, **settings)[0])
    return torch.cat(results, dim=1), None


def _window_mask(length: int, window: int | None, *, device: torch.device) -> Tensor | None:
    """Return bool (1, 1, L, L), set where a slot sees another; None for all earlier slots."""
    if window is None or length <= window:
        return None
    distance_LL = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return ((distance_LL >= 0) & (distance_LL < window))[None, None]


AttentionInterface.register(_BY_ROW, _by_row_attention)
AttentionMaskInterface.register(_BY_ROW, sdpa_mask)

_NEIGHBOURS: Final = ([0, 1, 1], [1, 0, 0])
_ROW: Final = [1, 0, 0, 1, 0]


def _dtype(model: PreTrainedModel) -> torch.dtype:
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


@torch.no_grad()
def _trial_alone(model: PreTrainedModel) -> Tensor:
    ids = torch.tensor([_ROW], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0]


@torch.no_grad()
def _passes_trial(model: PreTrainedModel, expected_LV: Tensor) -> bool:
    """Return whether a packed row has its logits, for each of two neighbours before it."""
    scale = _TOLERANCE.get(_dtype(model), _COARSE) * float(expected_LV.abs().max())
    for neighbour in _NEIGHBOURS:
        ids = torch.tensor([*neighbour, *_ROW], device=model.device)
        positions = torch.tensor([*range(len(neighbour)), *range(len(_ROW))], device=model.device)
        rows = PackedRows(ids, positions, (0, len(neighbour), len(ids)))
        logits_NV = model(**packed_inputs(model, rows)).logits[0]
        if not torch.allclose(logits_NV[len(neighbour) :], expected_LV, rtol=0, atol=scale):
            return False
    return True
