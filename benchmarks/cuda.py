"""Training speed of the engine on a CUDA device, with random weights of 0.5 and 1.5 B parameters.

    python benchmarks/cuda.py            # needs a CUDA device
    python benchmarks/cuda.py --tiny     # a small model on any device: checks that it works

Each update trains packed rows of random tokens in bfloat16, with and without gradient
checkpointing. The first updates are not counted. Tokens per second and MFU are of the wall time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from training import pull

from turnstream.batching.config import BatchingConfig
from turnstream.types import Group, Trajectory, Turn
from turnstream.worker import PulledMiniBatch
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.launch.stack import Stack
from turnstream_server.models.policy import load_policy, recompute_layers
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.reporting.timing import DeviceUse
from turnstream_server.trainer.settings import AdamSettings

_LARGE = SmallModelSpec(vocab_size=151_936, max_positions=32_768, weight_std=0.02)
SPECS = {
    "0.5 B": replace(_LARGE, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14),
    "1.5 B": replace(_LARGE, hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12),
}
TINY = SmallModelSpec(vocab_size=512, max_positions=4096)

ROW_TOKENS = 4096
PROMPT_TOKENS = 1024
NUM_WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The updates of one model.

    Attributes:
        tokens_per_s: all tokens of the rows, prompts too.
        mfu: None without CUDA, and on a device of unknown peak rate.
    """

    model: str
    recomputes: bool
    tokens_per_s: float
    mfu: float | None
    peak_gpu_bytes: float | None


def pull_mini_batch(*, num_rows: int, row_tokens: int, vocab_size: int) -> PulledMiniBatch:
    """Return rows of random tokens in one mini-batch, each in a pass of its own."""
    rng = np.random.default_rng(0)
    prompt = row_tokens * PROMPT_TOKENS // ROW_TOKENS
    cuts = [rng.integers(1, vocab_size, row_tokens).astype(np.int32) for _ in range(num_rows)]
    trajectories = [
        Trajectory(
            turns=[Turn(prompt_ids=ids[:prompt], response_ids=ids[prompt:])],
            sample=sample,
            reward=float(sample % 2),
        )
        for sample, ids in enumerate(cuts)
    ]
    with TemporaryDirectory() as folder, EmbeddedServer() as server:
        stack = Stack(Path(folder), store_url=server.url)
        try:
            address = stack.start_batcher().address
            groups = [Group(group_id="g", trajectories=trajectories)]
            config = BatchingConfig(
                batch_groups=1, mini_batch_groups=1, max_tokens_per_micro_batch=row_tokens
            )
            (mini_batch,) = pull(server.url, address, groups, name="cuda", config=config)
        finally:
            stack.stop()
    return mini_batch


def measure(
    name: str, spec: SmallModelSpec, *, recomputes: bool, mini_batch: PulledMiniBatch, updates: int
) -> Result:
    """Return the speed of updates on the CUDA device, or on the CPU without one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_policy(spec, device=device)
    if recomputes:
        recompute_layers(model)
    adam = AdamSettings(learning_rate=1e-6)
    engine = Engine(model, adam=adam, layout="packed", dtype=torch.bfloat16)
    use = DeviceUse(model)
    for _ in range(NUM_WARM_UP):
        engine.update(mini_batch, aggregation="token_mean")
    _finish(device)
    began_s = time.perf_counter()
    for _ in range(updates):
        engine.update(mini_batch, aggregation="token_mean")
    _finish(device)
    elapsed_s = time.perf_counter() - began_s
    lengths = mini_batch.rows.input_ids.lengths.astype(np.int64)
    found = use.lap(
        num_tokens=updates * int(lengths.sum()),
        squared_lengths=updates * int((lengths**2).sum()),
        step_s=elapsed_s,
    )
    return Result(
        model=name,
        recomputes=recomputes,
        tokens_per_s=updates * int(lengths.sum()) / elapsed_s,
        mfu=found["mfu"],
        peak_gpu_bytes=found["peak_gpu_bytes"],
    )


def results(*, tiny: bool, num_rows: int, updates: int) -> Iterator[Result]:
    """Yield the results of all models."""
    for name, spec in ({"tiny": TINY} if tiny else SPECS).items():
        mini_batch = pull_mini_batch(
            num_rows=num_rows,
            row_tokens=64 if tiny else ROW_TOKENS,
            vocab_size=spec.vocab_size,
        )
        for recomputes in (False, True):
            yield measure(name, spec, recomputes=recomputes, mini_batch=mini_batch, updates=updates)


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def report(found: Sequence[Result]) -> None:
    """Print a line for each model."""
    print(f"{'model':8} {'checkpointing':13} {'tokens/s':>10} {'MFU':>7} {'peak GB':>8}")
    for each in found:
        mfu = "-" if each.mfu is None else f"{each.mfu:.1%}"
        peak = "-" if each.peak_gpu_bytes is None else f"{each.peak_gpu_bytes / 1e9:.1f}"
        switch = "on" if each.recomputes else "off"
        print(f"{each.model:8} {switch:13} {each.tokens_per_s:10,.0f} {mfu:>7} {peak:>8}")


def main() -> None:
    """Measure all models and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=int, default=8, help="rows of an update")
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("there is no CUDA device: use --tiny to check that the benchmark works")
    updates = 1 if arguments.tiny else arguments.updates
    found = list(results(tiny=arguments.tiny, num_rows=arguments.rows, updates=updates))
    report(found)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=2))


if __name__ == "__main__":
    main()
