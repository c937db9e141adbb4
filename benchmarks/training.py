"""Trained tokens per CPU second of the trainer, for three layouts of the same trajectories.

    make bench                                         # synthetic agent trajectories
    python benchmarks/training.py --recordings tau_bench_trajectories.jsonl.gz --tokenizer FOLDER
    python benchmarks/training.py --tiny               # checks that it works

A run receives the trajectories, and a batcher assembles them. Then the engine trains a small random
model on every mini-batch, forward and backward with an optimizer step, on one thread:

    step-wise padded   one row for each turn, with its whole prompt: trainers without merging
    merged padded      turns that continue each other are one row
    merged packed      the same rows, one after another without padding

All three train the same tokens. CPU time of a layout is the least of several rounds, in turn.

Then one worker trains the merged packed rows as it pulls them, step by step. All trajectories were
published before. The share of its time in which it waits for data counts from the second step on:
the first one is not ready when the worker starts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from rollouts import make_trajectories

from turnstream import connect
from turnstream.batching.config import BatchingConfig
from turnstream.types import Group, Trajectory, Turn
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.generators.chat import ChatTokenizer
from turnstream_server.generators.recordings import read_groups
from turnstream_server.launch.stack import Stack
from turnstream_server.models.spec import SmallModelSpec

if TYPE_CHECKING:
    from turnstream import Run, Service
    from turnstream.worker import PulledMiniBatch
    from turnstream_server.trainer.engine import Engine

GOAL = 5.0
"""Trained tokens per CPU second of merged packed rows, over those of step-wise padded ones."""

WAIT_GOAL = 0.05
"""Share of the time in which a worker waits for data that is ready."""

NUM_SAMPLES = 4
BATCH_GROUPS = 4
PASS_TOKENS = 16_384
VOCABULARY = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the rows of a run reach the model."""

    name: str
    merge: bool
    shape: Literal["padded", "packed"]

    @property
    def config(self) -> BatchingConfig:
        """The configuration of its run."""
        return BatchingConfig(
            batch_groups=BATCH_GROUPS,
            mini_batch_groups=BATCH_GROUPS,
            merge=self.merge,
            max_staleness=1000,
            max_tokens_per_micro_batch=PASS_TOKENS,
            micro_batch_cost=self.shape,
        )


LAYOUTS = (
    Layout(name="step-wise padded", merge=False, shape="padded"),
    Layout(name="merged padded", merge=True, shape="padded"),
    Layout(name="merged packed", merge=True, shape="packed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The training of all mini-batches in one layout.

    Attributes:
        num_positions: positions of all forward passes, padding included.
    """

    layout: str
    num_rows: int
    num_tokens: int
    num_positions: int
    num_trained_tokens: int
    cpu_s: float

    @property
    def padding_share(self) -> float:
        """Share of padding among the positions, 0 to 1."""
        return 1 - self.num_tokens / self.num_positions

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per CPU second."""
        return self.num_trained_tokens / self.cpu_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The time of a worker from its second step to its last, in seconds."""

    num_steps: int
    elapsed_s: float
    wait_s: float

    @property
    def share(self) -> float:
        """Share of the time in which it waits for data, 0 to 1."""
        return self.wait_s / self.elapsed_s


# ------------------------------------------------------------------------------ trajectories


def recorded(path: Path, tokenizer: Path, *, num_groups: int) -> tuple[list[Group], int]:
    """Return the first groups of a file of recordings, and the size of the vocabulary."""
    chat = ChatTokenizer.load(tokenizer)
    groups = [
        Group(
            group_id=group.prompt_uid,
            trajectories=[
                Trajectory(turns=chat.encode_turns(each), sample=sample, reward=each.reward)
                for sample, each in enumerate(group.recordings)
            ],
        )
        for group in read_groups(path)[:num_groups]
    ]
    return groups, chat.vocab_size


def synthetic(*, num_groups: int, num_turns: int) -> tuple[list[Group], int]:
    """Return groups of agent trajectories of random tokens, and the size of the vocabulary."""
    made = make_trajectories(
        "short", breaks="none", num_trajectories=num_groups * NUM_SAMPLES, num_turns=num_turns
    )
    groups = [
        Group(
            group_id=f"g{first // NUM_SAMPLES}",
            trajectories=[
                Trajectory(turns=_small_ids(turns), sample=sample, reward=float(sample % 2))
                for sample, turns in enumerate(made[first : first + NUM_SAMPLES])
            ],
        )
        for first in range(0, len(made), NUM_SAMPLES)
    ]
    return groups, VOCABULARY


def _small_ids(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with ids of the vocabulary alone, without rewards and log-probabilities."""
    return [
        Turn(prompt_ids=turn.prompt_ids % VOCABULARY, response_ids=turn.response_ids % VOCABULARY)
        for turn in turns
    ]


def pull(
    store_url: str, batcher: str, groups: list[Group], *, name: str, config: BatchingConfig
) -> list[PulledMiniBatch]:
    """Publish the groups into a new run and return its mini-batches."""
    with connect(store_url) as service:
        run = _published(service, name.replace(" ", "-"), config, groups)
        pulled: list[PulledMiniBatch] = []
        with run.batches(batcher=batcher) as batches:
            for step in batches:
                pulled += list(step)
                step.done()
    return pulled


def train_and_wait(
    store_url: str, batcher: str, groups: list[Group], *, vocab_size: int
) -> Waiting:
    """Publish the groups, train each step as it is pulled, and return the waiting time."""
    layout = LAYOUTS[-1]
    engine = new_engine(layout, vocab_size=vocab_size)
    config = replace(layout.config, batch_groups=1, mini_batch_groups=1)
    waited: list[float] = []
    started_s = 0.0
    with connect(store_url) as service:
        run = _published(service, "waiting", config, groups)
        with run.batches(batcher=batcher) as batches:
            for step in batches:
                for mini_batch in step:
                    engine.update(mini_batch, aggregation="token_mean")
                step.done()
                if step.number == 1:
                    started_s = time.perf_counter()
                else:
                    waited.append(step.metrics["wait_s"])
    elapsed_s = time.perf_counter() - started_s
    return Waiting(num_steps=len(waited), elapsed_s=elapsed_s, wait_s=sum(waited))


def _published(service: Service, name: str, config: BatchingConfig, groups: list[Group]) -> Run:
    run = service.create_run(name, config)
    with run.publisher() as publisher:
        for group in groups:
            publisher.publish(group)
        publisher.flush()
        publisher.close_run("all groups published")
    return run


# ------------------------------------------------------------------------------ training


def train(engine: Engine, layout: Layout, mini_batches: Sequence[PulledMiniBatch]) -> Result:
    """Train every mini-batch once and return the counts and the CPU seconds."""
    started_s = time.process_time()
    for mini_batch in mini_batches:
        engine.update(mini_batch, aggregation="token_mean")
    cpu_s = time.process_time() - started_s
    return Result(
        layout=layout.name,
        num_rows=sum(each.info.num_real_rows for each in mini_batches),
        num_tokens=sum(each.num_tokens for each in mini_batches),
        num_positions=sum(_num_positions(each, layout) for each in mini_batches),
        num_trained_tokens=sum(each.denominators.num_tokens for each in mini_batches),
        cpu_s=cpu_s,
    )


def _num_positions(mini_batch: PulledMiniBatch, layout: Layout) -> int:
    if layout.shape == "packed":
        return sum(part.input_ids_N.numel() for part in mini_batch.to_torch_packed())
    return sum(part.input_ids_BT.numel() for part in mini_batch.to_torch().micro_batches())


def new_engine(layout: Layout, *, vocab_size: int) -> Engine:
    """Return an engine for a new small model; equal for all layouts."""
    from turnstream_server.models.policy import load_policy
    from turnstream_server.trainer.engine import Engine
    from turnstream_server.trainer.settings import AdamSettings

    spec = SmallModelSpec(vocab_size=vocab_size, max_positions=1 << 17)
    return Engine(load_policy(spec), adam=AdamSettings(learning_rate=1e-6), layout=layout.shape)


def measure(groups: list[Group], *, vocab_size: int, rounds: int) -> tuple[list[Result], Waiting]:
    """Return the least CPU seconds of every layout, and the waiting time of a worker."""
    import torch

    torch.set_num_threads(1)
    with TemporaryDirectory() as folder, EmbeddedServer() as server:
        stack = Stack(Path(folder), store_url=server.url)
        try:
            address = stack.start_batcher().address
            pulled = [
                pull(server.url, address, groups, name=each.name, config=each.config)
                for each in LAYOUTS
            ]
            waiting = train_and_wait(server.url, address, groups, vocab_size=vocab_size)
        finally:
            stack.stop()
    found = [
        [
            train(new_engine(layout, vocab_size=vocab_size), layout, mini_batches)
            for layout, mini_batches in zip(LAYOUTS, pulled, strict=True)
        ]
        for _ in range(rounds)
    ]
    least = [min(each, key=lambda result: result.cpu_s) for each in zip(*found, strict=True)]
    return least, waiting


def report(results: Sequence[Result], waiting: Waiting) -> None:
    """Print a line for each layout, the waiting time, and the goals."""
    first = results[0]
    print(f"{'layout':18}  rows    tokens  padding  trained/CPU s   times")
    for each in results:
        print(
            f"{each.layout:18} {each.num_rows:5} {each.num_tokens:9} {each.padding_share:8.1%} "
            f"{each.tokens_per_s:14.0f} {each.tokens_per_s / first.tokens_per_s:7.2f}"
        )
    gain = results[-1].tokens_per_s / first.tokens_per_s
    ratio = first.num_tokens / results[-1].num_tokens
    said = "reached" if gain >= GOAL else "missed"
    print(f"merged packed: {gain:.1f} times step-wise padded, of {GOAL:g}: {said}")
    print(f"tokens of step-wise rows / of merged rows: {ratio:.1f}")
    said = "reached" if waiting.share < WAIT_GOAL else "missed"
    print(
        f"a worker waits {waiting.share:.2%} of {waiting.elapsed_s:.1f} s in {waiting.num_steps} "
        f"steps, of at most {WAIT_GOAL:.0%}: {said}"
    )


def main() -> None:
    """Train the same trajectories in all layouts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recordings", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if (arguments.recordings is None) != (arguments.tokenizer is None):
        parser.error("use --recordings and --tokenizer together")
    rounds = 1 if arguments.tiny else arguments.rounds
    if arguments.recordings is not None:
        groups, vocab_size = recorded(
            arguments.recordings, arguments.tokenizer, num_groups=arguments.groups
        )
    else:
        num_turns = 2 if arguments.tiny else 12
        groups, vocab_size = synthetic(num_groups=arguments.groups, num_turns=num_turns)
    results, waiting = measure(groups, vocab_size=vocab_size, rounds=rounds)
    report(results, waiting)
    if arguments.json:
        source = arguments.recordings.name if arguments.recordings else "synthetic"
        lines = [
            asdict(each) | {"padding_share": each.padding_share, "tokens_per_s": each.tokens_per_s}
            for each in results
        ]
        found = {
            "source": source,
            "layouts": lines,
            "waiting": asdict(waiting) | {"share": waiting.share},
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
