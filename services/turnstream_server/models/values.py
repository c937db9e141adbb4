"""Values of a response under a critic: the reward that is expected from each token on.

Shapes: B rows, R response columns, N picked tokens, T columns, H hidden size.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnstream.errors import InvalidConfigError
from turnstream.worker.layouts import PackedTensors
from turnstream.worker.tensors import LeftPaddedTensors
from turnstream_server.models.logprobs import ScoringSlots, placed_scores


class ValueModel(nn.Module):
    """The layers of a causal language model, with a linear head to one number, which begins at 0.

    The layers become those of this model; the unembedding of the policy is dropped.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        backbone = cast(PreTrainedModel, policy.base_model)
        if backbone is policy:
            kind = policy.config.model_type
            raise InvalidConfigError("--critic", f"a {kind} model has no layers without its head")
        size = policy.config.get_text_config().hidden_size
        self.backbone = backbone
        self.head = nn.Linear(size, 1, device=policy.device, dtype=policy.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.backbone.device

    def forward(self, slots: ScoringSlots) -> Tensor:
        """Return the values at these slots, (N,), in the type of the head, also under autocast."""
        hidden_BTH = self.backbone(**slots.inputs).last_hidden_state
        hidden_NH = hidden_BTH[slots.row_N, slots.slot_N].to(self.head.weight.dtype)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            return self.head(hidden_NH)[:, 0]


def response_values(
    model: ValueModel, rows: LeftPaddedTensors | PackedTensors, *, mask_BR: Tensor
) -> Tensor:
    """Return the value before each response token, 0 outside the mask: float32 (B, R).

    It is read from the hidden state of the token before, like the log-probability. So it does not
    depend on the token itself, and the first response token has that of the prompt. The result of
    an empty mask is differentiable too; its gradient is 0. For packed rows, mask and result are of
    their slots, (N,).
    """

    def read(slots: ScoringSlots) -> Tensor:
        return cast(Tensor, model(slots))[None]

    return placed_scores(model.backbone, rows, mask_BR=mask_BR, read=read)[0]
