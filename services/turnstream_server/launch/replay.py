"""`turnstream replay`: recorded trajectories, published as if live, into a trainer that steps."""

from __future__ import annotations

from rich.console import Console

from turnstream.batching.config import BatchingConfig
from turnstream.errors import RecordError, TurnstreamError
from turnstream.store.run.runs import close_run
from turnstream_server.console.summary import Summary
from turnstream_server.generators.chat import ChatTokenizer
from turnstream_server.generators.recordings import read_groups
from turnstream_server.launch.job import Job, report, training_job, write_policy
from turnstream_server.launch.stack import Service
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.options import ReplayOptions
from turnstream_server.settings import Settings

_UNFINISHED = {"open", "sealed", "awaiting_reward", "planned", "stepped"}
"""States of the ledger that are not the end of a trajectory."""

_MAX_POSITIONS = 1 << 17
_MICRO_BATCH_TOKENS = 16_384
"""One forward pass of the tiny model keeps about 8,192 float32 logits per position: 0.5 GB."""


class IncompleteReplayError(TurnstreamError):
    """Not every trajectory of the file is accounted for."""


def run_replay_job(settings: Settings, options: ReplayOptions, console: Console) -> None:
    """Replay the file, print the summary and write it."""
    groups = read_groups(options.recordings)[: options.max_groups or None]
    if not groups:
        raise RecordError(f"{options.recordings}: has no trajectory")
    num_trajectories = sum(len(group.recordings) for group in groups)
    chat = ChatTokenizer.load(options.tokenizer)
    config = BatchingConfig(
        batch_groups=options.batch_groups,
        mini_batch_groups=options.batch_groups,
        pad_token_id=chat.pad_token_id,
        max_tokens_per_micro_batch=_MICRO_BATCH_TOKENS,
    )
    with training_job(settings, options.folder, kind="replay", config=config) as job:
        trainer, replayers = _start_services(job, options, chat)
        is_closed = False
        for _ in job.watch(console, timeout_s=options.max_seconds):
            if not is_closed and all(each.status is not None for each in replayers):
                close_run(job.client, job.run, "every recording is published")
                is_closed = True
            if trainer.status is not None:
                break
        job.stack.wait_for_all([*replayers, trainer], timeout_s=0.0)
        summary = job.history.summary()
    title = f"replay of {options.recordings.name}"
    report(summary, console, title=title, json_path=options.json_path)
    check_complete(summary, num_trajectories=num_trajectories)


def _start_services(
    job: Job, options: ReplayOptions, chat: ChatTokenizer
) -> tuple[Service, list[Service]]:
    """Start batcher, trainer and replay processes; return the last two kinds."""
    stack, run = job.stack, job.run
    spec = SmallModelSpec(
        vocab_size=chat.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=1,
        max_positions=_MAX_POSITIONS,
        seed=options.seed,
    )
    policy = write_policy(stack.folder, spec)
    trainer = stack.start(
        "trainer",
        "trainer",
        run=run,
        batcher=stack.start_batcher().address,
        policy=policy,
        folder=stack.folder / "trainer",
        learning_rate=1e-4,
        seed=options.seed,
        timeout=options.max_seconds,
        dump=options.dump_folder,
    )
    replayers = [
        stack.start(
            "replayer",
            f"replay-{shard}",
            str(options.recordings),
            run=run,
            writer=f"replay-{shard}",
            tokenizer=options.tokenizer,
            shard=shard,
            shards=options.num_processes,
            groups=options.max_groups,
            logprobs_by=policy if options.with_logprobs else None,
        )
        for shard in range(options.num_processes)
    ]
    return trainer, replayers


def check_complete(summary: Summary, *, num_trajectories: int) -> None:
    """Raise IncompleteReplayError unless every trajectory of the file has come to its end."""
    if summary.trajectories != num_trajectories:
        raise IncompleteReplayError(
            f"the file has {num_trajectories} trajectories, the ledger {summary.trajectories}"
        )
    unfinished = [
        f"{state} ({summary.ledger[state]})" for state in sorted(_UNFINISHED & {*summary.ledger})
    ]
    if unfinished:
        raise IncompleteReplayError(
            f"the run ended with trajectories that are {', '.join(unfinished)}"
        )
