"""Train a run under Ray Train: each Ray worker is one data-parallel rank.

    python examples/ray_train.py --run demo --model /shared/model --storage /shared/results

Plain torch and public calls of `turnstream` alone, so that the loop fits into an existing Ray job.
The trainer of this repository is no part of it: its folder, its checkpoints and its restarts would
be a second mechanism beside those of Ray. Needs `turnstream[worker,torch]`, transformers, and
`ray[train]` of release 2.60.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import (
    CheckpointConfig,
    CheckpointConsistencyMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    get_all_reported_checkpoints,
)
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchTrainer, get_device, prepare_model
from transformers import AutoModelForCausalLM

import turnstream
from turnstream.worker.losses import aggregate, ppo_clip, response_logprobs


def train(config: dict[str, Any]) -> None:
    """Train on one Ray worker until the run ends, from the newest checkpoint of Ray."""
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    checkpoint = ray.train.get_checkpoint()
    with checkpoint.as_directory() if checkpoint else nullcontext(config["model"]) as folder:
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        saved = torch.load(Path(folder, "trainer.pt"), map_location="cpu") if checkpoint else {}
    model = prepare_model(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"], weight_decay=0.0)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
    session = broadcast_from_rank_zero(uuid.uuid4().hex)  # new at each start, equal on all ranks
    run = turnstream.connect(config["redis"]).run(config["run"])
    place = {"dp_rank": rank, "dp_world_size": world_size, "session": session}
    step, norm, every = None, 0.0, config["checkpoint_every"]
    with run.batches(saved.get("state"), **place) as batches:
        if rank == 0 and batches.newest_version < 0:
            batches.announce_version(0, weights_uri=config["model"])
        for step in batches:
            for mini_batch in step:
                norm = update(model, optimizer, mini_batch, world_size=world_size)
            step.done()
            if step.number % every == 0:
                save(policy, optimizer, step, batches, gradient_norm=norm)
        if step is not None and step.number % every:
            save(policy, optimizer, step, batches, gradient_norm=norm)


def update(model: Any, optimizer: Any, mini_batch: Any, *, world_size: int) -> float:
    """Apply one optimizer step and return the norm of the gradient of the whole mini-batch.

    All ranks have the same number of micro-batches; those of inert rows have a loss of 0. Each loss
    is divided by the denominators of the whole mini-batch, so gradients add up over ranks. DDP
    averages them instead: `averaged_over` multiplies by the number of ranks.
    """
    parts = list(mini_batch.to_torch(get_device()).micro_batches())
    optimizer.zero_grad()
    for number, part in enumerate(parts, 1):
        with model.no_sync() if world_size > 1 and number < len(parts) else nullcontext():
            width = part.loss_mask_BR.shape[1]
            logits = model(
                input_ids=part.input_ids_BT,
                attention_mask=part.attention_mask_BT.long(),
                position_ids=part.position_ids_BT,
                logits_to_keep=width + 1,
                use_cache=False,
            ).logits
            loss_BR = ppo_clip(
                response_logprobs(logits, input_ids_BT=part.input_ids_BT, response_width=width),
                old_BR=part.require_logprobs(),
                advantages_BR=part.advantages_BR,
                mask_BR=part.loss_mask_BR,
            )
            aggregate(loss_BR, part, averaged_over=world_size).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return norm.item()


def save(policy: Any, optimizer: Any, step: Any, batches: Any, **metrics: float) -> None:
    """Report a checkpoint with weights, optimizer and recovery token, then commit the step.

    `report` returns before Ray has recorded the checkpoint; until then a failure resumes at the one
    before. So the step is committed, and its data may be deleted, once the checkpoint is recorded.
    """
    is_first = ray.train.get_context().get_world_rank() == 0
    metrics = {"step": step.number, **step.metrics, **metrics}
    with tempfile.TemporaryDirectory() as folder:
        if is_first:
            policy.save_pretrained(folder)
            trained = {"optimizer": optimizer.state_dict(), "state": step.done()}
            torch.save(trained, Path(folder, "trainer.pt"))
        made = ray.train.Checkpoint.from_directory(folder) if is_first else None
        ray.train.report(metrics, checkpoint=made)
    recorded = get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
    step.commit()
    if is_first:
        uri = recorded[-1].checkpoint.path
        batches.announce_version(batches.newest_version + 1, step=step.number, weights_uri=uri)


def main() -> None:
    """Start the trainer; the same command resumes at its newest checkpoint."""
    parser = argparse.ArgumentParser(description="Train a run under Ray Train.")
    parser.add_argument("--run", required=True, help="name of the run, and of its Ray results")
    parser.add_argument("--model", required=True, help="path of the first weights on all nodes")
    parser.add_argument("--storage", required=True, help="path of a folder that all nodes share")
    parser.add_argument("--redis", default=os.environ.get("TURNSTREAM_REDIS_URL"))
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker; else the CPU")
    parser.add_argument("--max-failures", type=int, default=3, help="restarts of the workers")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=options.num_workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name=options.run,
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=options.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),  # as the run: retain_checkpoints
        ),
    )
    print(json.dumps(trainer.fit().metrics))


if __name__ == "__main__":
    main()
