"""Sampled tokens per CPU second: continuous batching, against four ways without it.

    python benchmarks/sampling.py --json results/sampling.json
    python benchmarks/sampling.py --tiny        # checks that it works

A model with random weights answers requests with prompts of 8 to 64 tokens and 8 to 128 tokens to
sample. CPU time of one thread, the least of several rounds. All ways sample the same number of
tokens at temperature 1:

- continuous: the sampler. Requests join and quit the batch at any step.
- one at a time: the sampler with one running sequence.
- generate: `generate` of transformers with its cache, one request at a time.
- padded batch: `generate` for left-padded batches of 32 requests, as many as the sampler runs at a
  time. A batch runs until its longest request ends.
- no cache: `generate` without a cache, one request at a time, for a quarter of the requests.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from turnstream_server.models.continuous_batch import BatchLimits
from turnstream_server.models.policy import load_policy
from turnstream_server.models.sampler import Sampler
from turnstream_server.models.sampling_params import SamplingParams
from turnstream_server.models.spec import SmallModelSpec

RUNNING = 32
"""Sequences that run at the same time, and rows of a padded batch."""


class Request(NamedTuple):
    """A prompt and the number of tokens to sample."""

    prompt_ids: list[int]
    num_tokens: int


def make_requests(count: int, *, vocab_size: int) -> list[Request]:
    """Return requests of many lengths; equal arguments give equal requests."""
    rng = np.random.default_rng(0)
    return [
        Request(
            rng.integers(0, vocab_size, size=rng.integers(8, 65)).tolist(),
            int(rng.integers(8, 129)),
        )
        for _ in range(count)
    ]


def sample_continuously(
    model: PreTrainedModel, requests: Sequence[Request], *, running: int
) -> None:
    """Submit all requests at once, and wait for all results."""
    with Sampler(model, limits=BatchLimits(max_sequences=running)) as sampler:
        futures = [
            sampler.submit(
                request.prompt_ids, SamplingParams(max_tokens=request.num_tokens, stop_ids=())
            )
            for request in requests
        ]
        for request, future in zip(requests, futures, strict=True):
            assert len(future.result().sequences[0].token_ids) == request.num_tokens


def generate(
    model: PreTrainedModel, requests: Sequence[Request], *, running: int, use_cache: bool
) -> None:
    """Sample by `generate`, in left-padded batches of so many requests."""
    for begin in range(0, len(requests), running):
        batch = requests[begin : begin + running]
        width = max(len(request.prompt_ids) for request in batch)
        ids = [[0] * (width - len(each.prompt_ids)) + each.prompt_ids for each in batch]
        mask = [[int(at >= width - len(each.prompt_ids)) for at in range(width)] for each in batch]
        longest = max(request.num_tokens for request in batch)
        settings = GenerationConfig(
            do_sample=True,
            max_new_tokens=longest,
            use_cache=use_cache,
            pad_token_id=0,
            top_k=0,
        )
        made = model.generate(  # pyright: ignore[reportCallIssue]
            torch.tensor(ids), attention_mask=torch.tensor(mask), generation_config=settings
        )
        assert made.shape == (len(batch), width + longest)


def measure(*, num_requests: int, rounds: int, spec: SmallModelSpec) -> dict[str, Any]:
    """Return the tokens per CPU second of every way, and their ratios to the first."""
    torch.set_num_threads(1)
    model = load_policy(spec)
    model.generation_config = GenerationConfig()
    requests = make_requests(num_requests, vocab_size=spec.vocab_size)
    few = requests[: max(1, num_requests // 4)]
    ways: dict[str, tuple[Sequence[Request], Callable[[Sequence[Request]], None]]] = {
        "continuous": (requests, lambda own: sample_continuously(model, own, running=RUNNING)),
        "one at a time": (requests, lambda own: sample_continuously(model, own, running=1)),
        "generate": (requests, lambda own: generate(model, own, running=1, use_cache=True)),
        "padded batch": (
            requests,
            lambda own: generate(model, own, running=RUNNING, use_cache=True),
        ),
        "no cache": (few, lambda own: generate(model, own, running=1, use_cache=False)),
    }
    found: dict[str, Any] = {"num_requests": num_requests, "running": RUNNING, "ways": {}}
    for name, (own, run) in ways.items():
        seconds = min(_cpu_seconds(run, own) for _ in range(rounds))
        found["ways"][name] = sum(request.num_tokens for request in own) / seconds
    found["num_tokens"] = sum(request.num_tokens for request in requests)
    found["parameters"] = sum(weights.numel() for weights in model.parameters())
    return found


def _cpu_seconds(run: Callable[[Sequence[Request]], None], requests: Sequence[Request]) -> float:
    start = time.process_time()
    run(requests)
    return time.process_time() - start


def main() -> None:
    """Measure and print one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="few requests, to check that it works")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.tiny:
        spec = SmallModelSpec(vocab_size=64, hidden_size=32)
        found = measure(num_requests=4, rounds=1, spec=spec)
    else:
        spec = SmallModelSpec(
            vocab_size=4096, hidden_size=256, intermediate_size=768, num_layers=4, weight_std=0.02
        )
        found = measure(num_requests=48, rounds=2, spec=spec)
    print(f"{'way':14} {'tokens/CPU s':>13} {'continuous is':>14}")
    for name, speed in found["ways"].items():
        print(f"{name:14} {speed:13.0f} {found['ways']['continuous'] / speed:12.1f} x")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
