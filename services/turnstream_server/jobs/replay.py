"""`turnstream replay`: recorded trajectories, published as if live, into a trainer that steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from turnstream.batching.config import BatchingConfig
from turnstream.errors import RecordError, TurnstreamError
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import close_run, create_run
from turnstream_server.bus.core.stores import open_store
from turnstream_server.generators.chat import ChatTokenizer
from turnstream_server.generators.recordings import RecordedGroup, read_groups
from turnstream_server.generators.replay import ReplayConfig
from turnstream_server.jobs.history import RunHistory
from turnstream_server.jobs.progress import ProgressDisplay, ProgressView
from turnstream_server.jobs.services import (
    start_batcher,
    start_replay,
    start_trainer,
    store_environment,
)
from turnstream_server.jobs.stack import Service, Stack, job_folder
from turnstream_server.jobs.summary import Summary, summary_table
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.settings import Settings
from turnstream_server.trainer.config import OptimizerConfig, TrainerConfig

_ON_THEIR_WAY = {"open", "sealed", "awaiting_reward", "planned", "stepped"}
"""States of the ledger that are not the end of a trajectory."""

_REFRESH_S = 0.25
_MAX_POSITIONS = 1 << 17
_MICRO_BATCH_TOKENS = 16_384
"""One forward pass of the tiny model keeps about 8,192 float32 logits per position: 0.5 GB."""


class IncompleteReplayError(TurnstreamError):
    """Not every trajectory of the file is accounted for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Options of `turnstream replay`; see its command line for the meaning."""

    recordings: Path
    tokenizer: Path
    folder: Path
    json_path: Path | None = None
    max_groups: int = 0
    num_processes: int = 2
    batch_groups: int = 4
    speed: float = 0.0
    with_logprobs: bool = False
    dump_folder: Path | None = None
    max_seconds: float = 3600.0
    seed: int = 0


class _Replay(NamedTuple):
    """One replay under way."""

    stack: Stack
    history: RunHistory
    num_trajectories: int
    start_s: float
    timeout_s: float
    display: ProgressDisplay


def run_replay_job(settings: Settings, options: ReplayOptions, console: Console) -> int:
    """Replay the file, print the summary and write it; gives the exit status, 0."""
    groups = _groups_to_replay(options)
    chat = ChatTokenizer.load(options.tokenizer)
    run = f"replay-{time.strftime('%Y%m%d-%H%M%S')}"
    with (
        job_folder(options.folder, job="replay") as folder,
        open_store(settings.model_copy(update={"data_dir": folder / "store"})) as url,
        connect(url) as client,
        Stack(folder, store_environment(url)) as stack,
        ProgressDisplay(console) as display,
    ):
        create_run(client, run, _batching(options, chat))
        replay = _Replay(
            stack=stack,
            history=RunHistory(client, run),
            num_trajectories=sum(len(group.recordings) for group in groups),
            start_s=time.monotonic(),
            timeout_s=options.max_seconds,
            display=display,
        )
        trainer, replayers = _start_services(stack, options, run=run, url=url, chat=chat)
        _wait(replay, replayers)
        close_run(client, run, "every recording is published")
        _wait(replay, [trainer])
        summary = replay.history.summary()
    _report(summary, options, console)
    check_complete(summary, num_trajectories=replay.num_trajectories)
    return 0


def _groups_to_replay(options: ReplayOptions) -> list[RecordedGroup]:
    groups = read_groups(options.recordings)[: options.max_groups or None]
    if not groups:
        raise RecordError(f"{options.recordings}: has no trajectory")
    return groups


def _batching(options: ReplayOptions, chat: ChatTokenizer) -> BatchingConfig:
    return BatchingConfig(
        batch_groups=options.batch_groups,
        mini_batch_groups=options.batch_groups,
        pad_token_id=chat.pad_token_id,
        max_tokens_per_micro_batch=_MICRO_BATCH_TOKENS,
    )


def _start_services(
    stack: Stack, options: ReplayOptions, *, run: str, url: str, chat: ChatTokenizer
) -> tuple[Service, list[Service]]:
    """Batcher, trainer and replay processes; gives the last two."""
    policy = SmallModelSpec(
        vocab_size=chat.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=1,
        max_positions=_MAX_POSITIONS,
        seed=options.seed,
    )
    batcher = start_batcher(stack, name="batcher")
    trainer = start_trainer(
        stack,
        TrainerConfig(
            run=run,
            batcher_target=batcher.address,
            policy=policy,
            folder=stack.folder / "trainer",
            optimizer=OptimizerConfig(learning_rate=1e-4),
            seed=options.seed,
            timeout_s=options.max_seconds,
            dump_folder=options.dump_folder,
        ),
    )
    configs = [
        ReplayConfig(
            redis_url=url,
            run=run,
            writer=f"replay-{shard}",
            recordings=options.recordings,
            tokenizer=options.tokenizer,
            shard=shard,
            num_shards=options.num_processes,
            max_groups=options.max_groups,
            speed=options.speed,
            policy=policy if options.with_logprobs else None,
        )
        for shard in range(options.num_processes)
    ]
    return trainer, [start_replay(stack, config) for config in configs]


def _wait(replay: _Replay, services: Sequence[Service]) -> None:
    """Show the progress until these services are done."""
    timeout_s = replay.start_s + replay.timeout_s - time.monotonic()
    for _ in replay.stack.watch(timeout_s=timeout_s, every_s=_REFRESH_S):
        if all(service.status is not None for service in services):
            return
        replay.display.show(_view(replay))
    for service in services:
        service.wait(0.0)


def _view(replay: _Replay) -> ProgressView:
    summary = replay.history.summary()
    num_trained = summary.ledger.get("stepped", 0) + summary.ledger.get("committed", 0)
    return ProgressView(
        share=num_trained / replay.num_trajectories,
        elapsed_s=time.monotonic() - replay.start_s,
        summary=summary,
    )


def _report(summary: Summary, options: ReplayOptions, console: Console) -> None:
    console.print(summary_table(summary, title=f"replay of {options.recordings.name}"))
    if options.json_path is not None:
        options.json_path.write_text(summary.to_json(), encoding="utf-8")


def check_complete(summary: Summary, *, num_trajectories: int) -> None:
    """Make sure that every trajectory of the file has come to its end."""
    if summary.trajectories != num_trajectories:
        raise IncompleteReplayError(
            f"the file has {num_trajectories} trajectories, the ledger {summary.trajectories}"
        )
    unfinished = _ON_THEIR_WAY & set(summary.ledger)
    if unfinished:
        raise IncompleteReplayError(
            "the run ended with trajectories that are "
            + ", ".join(f"{state} ({summary.ledger[state]})" for state in sorted(unfinished))
        )
