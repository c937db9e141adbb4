"""The rows that were trained on, as files, for whoever wants to see what the trainer saw.

One file per mini-batch, `step-<step>-<mini-batch>.npz`, inert rows left out. With B rows: `row_id`,
`trajectory_id`, `prompt_length`, `reward` and `advantage` (B,), `input_ids` with `row_offsets`
(B + 1,), and on the responses `loss_mask` and, where the rows have them, `logprobs` with
`response_offsets` (B + 1,).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from turnstream.types import MiniBatch, Ragged


class RowDump:
    """Writes mini-batches into a folder, which is made if it is missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, mini_batch: MiniBatch) -> None:
        """Write one mini-batch; the same one again replaces its file."""
        rows, info = mini_batch.rows, mini_batch.info
        real_B = np.flatnonzero(~rows.is_padding)
        responses = _picked(rows.loss_mask, real_B)
        tokens = _picked(rows.input_ids, real_B)
        columns = {
            "row_id": rows.row_id[real_B],
            "trajectory_id": np.array([rows.trajectory_id[row] for row in real_B.tolist()]),
            "prompt_length": rows.prompt_length[real_B],
            "reward": rows.reward[real_B],
            "advantage": rows.advantage[real_B],
            "input_ids": tokens.values,
            "row_offsets": tokens.offsets,
            "loss_mask": responses.values,
            "response_offsets": responses.offsets,
        }
        if rows.logprobs is not None:
            columns["logprobs"] = _picked(rows.logprobs, real_B).values
        np.savez(self._folder / f"step-{info.step:06}-{info.mini_batch}.npz", **columns)


def _picked(column: Ragged, rows_B: np.ndarray) -> Ragged:
    values = column.values
    return Ragged.from_rows([column[row] for row in rows_B.tolist()], values.dtype.type)
