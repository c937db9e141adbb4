"""A complete trainer: packed batches, ranks, PPO clip, TensorBoard, checkpoints, resume.

    turnstream up
    python examples/generator.py
    torchrun --standalone --nproc-per-node=2 examples/complete_trainer.py --folder out
    tensorboard --logdir out

The same command continues a killed trainer at its newest checkpoint. Without torchrun it is one
rank, and without `--model` a tiny model with random weights. All ranks need the same `--folder`.
To be copied: torch and public calls of `turnstream` alone; docs/trainer.md has a trainer with more.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.utils.tensorboard import SummaryWriter

import turnstream
from turnstream.worker.losses import aggregate, kl_k3, next_token_logprobs, ppo_clip

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
SHOWN = ("reward_mean", "loss", "kl", "gradient_norm")
CLIP: Any = {"clip_low": 0.2, "clip_high": 0.28}
TINY = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
TINY |= {"num_hidden_layers": 2, "num_key_value_heads": 2}
KEPT_CHECKPOINTS = 2  # as `retain_checkpoints` of the run


def main() -> None:
    """Train until the run ends."""
    options = parse_options()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    folder = newest_checkpoint(options.folder)
    model = load_model(folder or options.model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, weight_decay=0.0)
    saved: Any = torch.load(folder / "trainer.pt", map_location=device) if folder else {}
    if folder:
        optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, saved.get("state"), options)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


def train(model: Any, optimizer: Any, state: str | None, options: argparse.Namespace) -> None:
    """Train every step after `state`; every `checkpoint_every` steps are saved and committed."""
    board, step = None, None
    with turnstream.connect().run(options.run).batches(state) as batches:
        for step in batches:
            if RANK == 0 and board is None:  # hides what a killed trainer wrote of later steps
                board = SummaryWriter(str(options.folder), purge_step=step.number)
            metrics = train_step(model, optimizer, step, epochs=options.epochs)
            step.done()  # returns when all ranks have called it
            if board is not None:
                log(board, step, metrics)
            if step.number % options.checkpoint_every == 0:
                save(model, optimizer, step, batches, options.folder)
        if step is not None and step.number % options.checkpoint_every:
            save(model, optimizer, step, batches, options.folder)


def train_step(model: Any, optimizer: Any, step: Any, *, epochs: int) -> dict[str, float]:
    """Make `epochs` updates with each mini-batch of a step; return their mean loss, KL and norm.

    Old log-probabilities are computed for all mini-batches before the first update, under the
    weights at the start of the step. Those of the generator are taken where its turns have them.
    """
    mini_batches = [mini_batch.to_torch_packed(model.device) for mini_batch in step]
    with torch.no_grad():
        old = [[old_logprobs(model, part) for part in parts] for parts in mini_batches]
    pairs = [*zip(mini_batches, old, strict=True)] * epochs
    results = [update(model, optimizer, *pair) for pair in pairs]
    means = torch.tensor(results, dtype=torch.float64).mean(0).tolist()
    return dict(zip(("loss", "kl", "gradient_norm"), means, strict=True))


def update(model: Any, optimizer: Any, parts: Any, olds: Any) -> tuple[float, float, float]:
    """Apply one optimizer step; return loss, KL to the old policy and gradient norm.

    Losses are divided by denominators of the whole mini-batch: they add up over passes and ranks.
    """
    optimizer.zero_grad()
    sums = torch.zeros(2, device=model.device)
    for part, old_N in zip(parts, olds, strict=True):
        current_N, mask_N = logprobs(model, part), part.loss_mask_N
        inputs: Any = {"old_BR": old_N, "advantages_BR": part.advantages_N, "mask_BR": mask_N}
        loss = aggregate(ppo_clip(current_N, **inputs, **CLIP), part)
        loss.backward()
        kl_N = kl_k3(current_N.detach(), reference_BR=old_N, mask_BR=mask_N)
        sums += torch.stack((loss.detach(), kl_N.sum() / max(part.denominators.num_tokens, 1)))
    if WORLD_SIZE > 1:
        for tensor in (sums, *(p.grad for p in model.parameters() if p.grad is not None)):
            dist.all_reduce(tensor)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    if math.isfinite(norm):  # it is the same on all ranks
        optimizer.step()
    return sums[0].item(), sums[1].item(), norm


def logprobs(model: Any, part: Any) -> torch.Tensor:
    """Return the log-probability of the token after each slot, (N,).

    transformers finds the rows by their positions, which begin at 0, and no row sees another.
    """
    inputs = {"input_ids": part.input_ids_N[None], "position_ids": part.position_ids_N[None]}
    logits_NV = model(**inputs, use_cache=False).logits[0].float()
    return next_token_logprobs(logits_NV, input_ids=part.input_ids_N)


def old_logprobs(model: Any, part: Any) -> torch.Tensor:
    """Return the generator's log-probabilities, (N,), and the model's where a turn has none."""
    own_N, given_N = logprobs(model, part), part.logprobs_N
    return own_N if given_N is None else torch.where(given_N.isnan(), own_N, given_N)


def log(board: SummaryWriter, step: Any, metrics: dict[str, float]) -> None:
    """Write a step to TensorBoard, and a line to the terminal."""
    metrics = {**step.metrics, **metrics}
    for name, value in metrics.items():
        board.add_scalar(f"train/{name}", value, step.number)
    board.flush()
    print(f"step {step.number}", *(f"{name} {metrics[name]:.4g}" for name in SHOWN), flush=True)


def save(model: Any, optimizer: Any, step: Any, batches: Any, folder: Path) -> None:
    """Write a checkpoint on rank 0 and announce its weights; all ranks then commit the step."""
    target = folder / f"checkpoint-{step.number:08d}"
    if RANK == 0:
        unfinished = folder / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        model.save_pretrained(unfinished)
        saved = {"optimizer": optimizer.state_dict(), "state": step.done()}
        torch.save(saved, unfinished / "trainer.pt")
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        unfinished.rename(target)  # whole or absent, whenever the process is killed
        sync(folder)
    if WORLD_SIZE > 1:
        dist.barrier()
    step.commit()
    if RANK == 0:
        version = batches.newest_version + 1
        batches.announce_version(version, step=step.number, weights_uri=target.resolve().as_uri())
        for older in sorted(folder.glob("checkpoint-*"))[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(older)


def sync(path: Path) -> None:
    """Write a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint, the same on all ranks, or None."""
    found = [max(folder.glob("checkpoint-*"), default=None)]
    if WORLD_SIZE > 1:
        dist.broadcast_object_list(found)
    return found[0]


def load_model(source: Path | None) -> Any:
    """Return the model of a folder, or a tiny one with the same random weights on all ranks."""
    transformers.utils.logging.disable_progress_bar()
    if source is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen2", **TINY)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Train a run.")
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints and TensorBoard")
    parser.add_argument("--run", default="demo")
    parser.add_argument("--model", type=Path, help="folder of the first weights")
    parser.add_argument("--epochs", type=int, default=2, help="updates with each mini-batch")
    parser.add_argument("--checkpoint-every", type=int, default=2, help="steps")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
