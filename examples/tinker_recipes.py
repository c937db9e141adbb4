"""Run recipes of the tinker-cookbook, unmodified and offline, on a small model of a gateway.

    python -m venv cookbook
    cookbook/bin/pip install torch tinker-cookbook==0.5.8 sympy pylatexenc math-verify matplotlib
    cookbook/bin/pip install --no-deps tinker-cookbook==0.6.1
    turnstream byte-model byte
    turnstream up $(cookbook/bin/python examples/tinker_recipes.py --base-models byte)
    export TINKER_BASE_URL=http://127.0.0.1:7601 TINKER_API_KEY=tml-local
    cookbook/bin/python examples/tinker_recipes.py --model byte --folder recipes

Each line of the output says what a recipe has learned, such as `format 0.46 -> 0.88`. A recipe that
learns less than its check asks for fails: `--learning-rate 0` shows it. A recipe whose metrics show
no learning only has to end. Data sets are synthetic files in the places where the recipes look for
hub data.

The first recipe teaches the model to answer half of the sums with the number, and half with a
sentence. RL on sums starts from its checkpoint, and a sentence is longer than its answers may be.
So about half of the first answers end in time, the metric `format`, and RL learns to prefer the
number. A model of this size does not learn to add.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

NAMES: Final = (
    *("tiny/byte", "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
    "Qwen/Qwen3.5-9B",
)
"""Names under which the recipes ask for base models and tokenizers."""

_BYTE: Final = "model_name=tiny/byte renderer_name=role_colon"
_AGAIN: Final = "behavior_if_log_dir_exists=delete"
_ADDITION: Final = f"math_rl.train {_BYTE} {_AGAIN} env=arithmetic load_checkpoint_path={{state}}"
_IS: Final = "loss_fn=importance_sampling"
_SMALL: Final = "group_size=8 groups_per_batch=8 max_tokens=12 learning_rate=3e-4 max_steps=30"
_FIRST: Final = 3
"""Steps whose mean is what a recipe begins with."""

Metrics = list[dict[str, Any]]
Check = Callable[[Metrics], str]
"""Returns a line of evidence; raises AssertionError if the recipe has not learned."""


class Recipe(NamedTuple):
    """A recipe, its arguments, and the check of its metrics.

    `{state}` and `{sampler}` in the arguments are the paths of the first recipe's checkpoint.
    """

    name: str
    command: str
    check: Check
    logs: bool = True


def main() -> None:
    """Run the recipes that are named, or all; exit with 1 if one has not learned."""
    options = _options()
    if options.base_models:
        print(" ".join(f"--base-model {name}={options.base_models}" for name in NAMES))
        return
    folder: Path = options.folder.resolve()
    prepare(folder, options.model)
    names = options.recipe or [each.name for each in RECIPES]
    failed = 0
    for recipe in RECIPES:
        if recipe.name == RECIPES[0].name or recipe.name in names:
            failed += not run(with_rate(recipe, options.learning_rate), folder)
    plot_reward(folder)
    sys.exit(1 if failed else 0)


def with_rate(recipe: Recipe, learning_rate: float | None) -> Recipe:
    """Return a recipe with this learning rate, if one is given; the first recipe keeps its own."""
    if learning_rate is None or recipe.name == RECIPES[0].name:
        return recipe
    words = [each for each in recipe.command.split() if not each.startswith("learning_rate=")]
    return recipe._replace(command=" ".join([*words, f"learning_rate={learning_rate:g}"]))


def run(recipe: Recipe, folder: Path) -> bool:
    """Run a recipe, print its evidence, and return whether it has learned."""
    log = folder / "log" / recipe.name
    words = recipe.command.format(**checkpoint(folder)).split()
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{words[0]}", *words[1:]]
    if recipe.logs:
        shutil.rmtree(log, ignore_errors=True)
        command.append(f"log_path={log}")
    began_s = time.monotonic()
    output = folder / f"{recipe.name}.txt"
    with output.open("w", encoding="utf-8") as file:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
        status = subprocess.run(
            command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False
        ).returncode
    seconds = time.monotonic() - began_s
    try:
        assert status == 0, f"it ended with {status}: {output}"
        evidence = recipe.check(read_metrics(log))
    except AssertionError as error:
        print(f"{recipe.name:<12} FAILED {seconds:4.0f} s  {error}", flush=True)
        return False
    print(f"{recipe.name:<12} ok     {seconds:4.0f} s  {evidence}", flush=True)
    return True


def checkpoint(folder: Path) -> Mapping[str, str]:
    """Return the paths of the last checkpoint of the first recipe; none before it has run."""
    file = folder / "log" / RECIPES[0].name / "checkpoints.jsonl"
    if not file.is_file():
        return {"state": "", "sampler": ""}
    last = json.loads(file.read_text().splitlines()[-1])
    return {"state": last["state_path"], "sampler": last["sampler_path"]}


def read_metrics(log: Path) -> Metrics:
    """Return the metrics of each step of a recipe."""
    file = log / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def column(metrics: Metrics, name: str) -> list[float]:
    """Return a metric of the steps that have it."""
    values = [step[name] for step in metrics if name in step]
    assert values, f"there is no metric {name}"
    return values


def nll_falls(metrics: Metrics) -> str:
    """Check that the loss falls by 5 % or more."""
    nll = column(metrics, "train_mean_nll")
    assert nll[-1] < 0.95 * nll[0], f"NLL {nll[0]:.2f} -> {nll[-1]:.2f}"
    return f"NLL {nll[0]:.2f} -> {nll[-1]:.2f}"


def has_sampled_logprobs(metrics: Metrics) -> str:
    """Check that samples have the log-probabilities of training."""
    distance = max(map(abs, column(metrics, "optim/kl_sample_train_v1")))
    assert distance < 1e-4, f"kl_sample_train is {distance:.2g}"
    return f"kl_sample_train at most {distance:.1g}"


def rises(metrics: Metrics, name: str, *, by: float) -> str:
    """Check that a metric rises, by this much and by four standard errors.

    Compared are the means of the first three steps and of the last third. The noise of a step is
    that of the differences between neighbours, which a steady rise hardly changes.
    """
    values = column(metrics, name)
    first, last = values[:_FIRST], values[-(len(values) // 3) :]
    assert len(last) >= _FIRST, f"{name} has {len(values)} steps"
    noise = fmean((after - before) ** 2 / 2 for before, after in pairwise(values)) ** 0.5
    error = noise * (1 / len(first) + 1 / len(last)) ** 0.5
    rise = fmean(last) - fmean(first)
    label = name.rpartition("all/")[2]
    change = f"{label} {fmean(first):.3f} -> {fmean(last):.3f} ({rise:+.3f} ± {error:.3f})"
    wanted = max(by, 4 * error)
    assert rise >= wanted, f"{change}, wanted {wanted:.3f} more"
    return change


def format_rises(metrics: Metrics) -> str:
    """Check that more answers end in time: by 0.15 of all."""
    return rises(metrics, "env/all/format", by=0.15)


def on_policy_format_rises(metrics: Metrics) -> str:
    """Check the same, and that samples have the log-probabilities of training."""
    return f"{format_rises(metrics)}, {has_sampled_logprobs(metrics)}"


def on_policy_reward_rises(metrics: Metrics) -> str:
    """Check that the mean reward rises, and that samples have the log-probabilities of training."""
    change = rises(metrics, "env/all/reward/total", by=0.03)
    return f"{change}, {has_sampled_logprobs(metrics)}"


def teacher_kl_halves(metrics: Metrics) -> str:
    """Check that the distance to the teacher halves."""
    distances = column(metrics, "teacher_kl")
    assert distances[-1] < distances[0] / 2, f"teacher_kl {distances[0]:.2f} -> {distances[-1]:.2f}"
    return f"teacher_kl {distances[0]:.2f} -> {distances[-1]:.2f}"


def dpo_begins_at_log_2(metrics: Metrics) -> str:
    """Check the loss of a policy that equals its reference, and that it moves."""
    losses = column(metrics, "dpo_loss")
    assert abs(losses[0] - 0.6931) < 1e-3, f"loss {losses[0]:.4f}"
    assert losses[-1] < losses[0], f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"
    return f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"


def ended(_: Metrics) -> str:
    """Accept a recipe whose metrics show no learning."""
    return "ended"


RECIPES: Final = (
    Recipe(
        "sft",
        f"chat_sl.train {_BYTE} {_AGAIN} dataset=addition.jsonl batch_size=32 max_length=256 "
        "num_epochs=3 learning_rate=0.02",
        nll_falls,
    ),
    Recipe("rl", f"{_ADDITION} {_IS} {_SMALL}", on_policy_format_rises),
    Recipe("rl_async", f"{_ADDITION} {_IS} {_SMALL} max_steps_off_policy=2", format_rises),
    Recipe(
        "rl_ppo",
        f"{_ADDITION} loss_fn=ppo {_SMALL} num_substeps=2 compute_post_kl=True",
        format_rises,
    ),
    Recipe(
        "rl_stream",
        f"{_ADDITION} {_IS} {_SMALL} stream_minibatch_config.groups_per_batch=8 "
        "stream_minibatch_config.num_minibatches=2",
        format_rises,
    ),
    Recipe(
        "distillation",
        f"distillation.on_policy_distillation {_BYTE} {_AGAIN} teacher_model=tiny/byte "
        "teacher_checkpoint={sampler} dataset=deepmath groups_per_batch=8 group_size=4 "
        "max_tokens=24 learning_rate=0.003 eval_every=0 max_steps=25",
        teacher_kl_halves,
    ),
    Recipe(
        "shorter",
        f"preference.shorter.train {_BYTE} {_AGAIN} batch_size=4 group_size=4 max_tokens=12 "
        "eval_every=0 max_steps=2",
        has_sampled_logprobs,
    ),
    Recipe(
        "dpo",
        "preference.dpo.train dataset=hhh batch_size=16 max_length=256 max_steps=3 "
        "learning_rate=1e-3",
        dpo_begins_at_log_2,
    ),
    Recipe(
        "sl_loop", "sl_loop max_length=512 max_steps=4 batch_size=32 learning_rate=3e-3", nll_falls
    ),
    Recipe("sl_basic", "sl_basic max_steps=12 learning_rate=3e-3", nll_falls),
    Recipe(
        "sdft",
        "sdft.train model_name=Qwen/Qwen3-8B dataset=toolalpaca topk=5 groups_per_batch=4 "
        "group_size=1 max_tokens=12 max_steps=2 eval_every=0",
        ended,
    ),
    Recipe(
        "sdft_reverse",
        "sdft.train model_name=Qwen/Qwen3-8B dataset=toolalpaca topk=5 groups_per_batch=4 "
        "group_size=1 max_tokens=12 max_steps=2 eval_every=0 reverse=True",
        ended,
    ),
    Recipe(
        "numerics",
        "rl_numerics_check.train model_name=Qwen/Qwen3.5-9B "
        "renderer_name=qwen3_5_disable_thinking group_size=8 groups_per_batch=4 max_tokens=96 "
        "max_steps=9 learning_rate=3e-3 task.num_pages_min=2 task.num_pages_max=3 "
        "task.page_chars=300 max_trajectory_tokens=8192",
        on_policy_reward_rises,
    ),
    Recipe(
        "rlhf",
        "preference.rlhf.rlhf_pipeline short_name=t batch_size=8 max_length=512 rl_max_tokens=8 "
        "rl_group_size=2 max_steps=2 eval_every=0",
        ended,
        logs=False,
    ),
    Recipe("rl_loop", f"rl_loop batch_size=4 group_size=4 max_tokens=8 max_steps=2 {_IS}", ended),
    Recipe(
        "guess",
        f"multiplayer_rl.guess_number.train {_BYTE} {_AGAIN} batch_size=4 group_size=4 "
        "max_steps=2 eval_every=0",
        ended,
    ),
    Recipe(
        "rl_basic_kl",
        "rl_basic max_tokens=4 max_steps=1 kl_penalty_coef=0.1 "
        "kl_reference_config.base_model=Qwen/Qwen3.5-9B-Base",
        ended,
    ),
)


def prepare(folder: Path, model: Path) -> None:
    """Write data sets and tokenizers where the recipes look for them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file in model.glob("*.json"):
            shutil.copy(file, folder / name)
    rng = random.Random(0)
    _write(folder / "addition.jsonl", [{"messages": each} for each in _two_forms(rng, 512)])
    for split, count in (("train", 512), ("test", 64)):
        _write_split(folder, rng, split=split, count=count)
    questions = [(ask["content"], answer["content"]) for ask, answer in _dialogs(rng, 512)]
    rows = [{"question": ask, "final_answer": answer} for ask, answer in questions]
    _write(folder / "zwhe99/DeepMath-103K/train.jsonl", rows)
    rows = [{"instruction": ask, "output": answer} for ask, answer in questions[:128]]
    _write(folder / "tangqiaoyu/ToolAlpaca/train.jsonl", rows)
    pages = [" ".join(ask for ask, _ in questions[at : at + 20]) for at in range(0, 480, 4)]
    _write(folder / "Salesforce/wikitext/train.jsonl", [{"text": page} for page in pages])
    for name in ("wikitext-103-raw-v1", "wikitext-2-raw-v1"):
        _declare(folder / "Salesforce/wikitext", name, ["train"])
    _declare(folder / "openai/gsm8k", "main", ["train", "test"])


def plot_reward(folder: Path) -> None:
    """Draw the reward of RL into `reward.png`, where matplotlib is installed."""
    metrics = read_metrics(folder / "log/rl")
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    if metrics:
        figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
        axes.plot(column(metrics, "env/all/reward/total"), marker="o")
        axes.set(xlabel="step", ylabel="mean reward", title="Arithmetic RL after SFT")
        figure.savefig(folder / "reward.png", dpi=120)


def _write_split(folder: Path, rng: random.Random, *, split: str, count: int) -> None:
    dialogs = [*_dialogs(rng, count)]
    rows: list[dict[str, Any]] = [
        {"prompt": each[0]["content"], "prompt_id": str(place), "messages": each, "category": "sum"}
        for place, each in enumerate(dialogs)
    ]
    _write(folder / f"HuggingFaceH4/no_robots/{split}.jsonl", rows)
    rows = [
        {"question": ask["content"], "answer": f"Add them. #### {answer['content']}"}
        for ask, answer in dialogs
    ]
    _write(folder / f"openai/gsm8k/{split}.jsonl", rows)
    rows = []
    for ask, answer in dialogs:
        start = f"\n\nHuman: {ask['content']}\n\nAssistant: "
        wrong = int(answer["content"]) + rng.randint(1, 9)
        rows.append({"chosen": start + answer["content"], "rejected": f"{start}{wrong}"})
    _write(folder / f"Anthropic/hh-rlhf/{split}.jsonl", rows)


def _dialogs(rng: random.Random, count: int) -> Iterator[list[dict[str, str]]]:
    """Yield questions for sums, and their answers."""
    for _ in range(count):
        first, second = rng.randint(0, 99), rng.randint(0, 99)
        yield [
            {"role": "user", "content": f"What is {first} + {second}?"},
            {"role": "assistant", "content": str(first + second)},
        ]


def _two_forms(rng: random.Random, count: int) -> Iterator[list[dict[str, str]]]:
    """Yield sums as RL asks them, after an example; half of the answers are a long sentence."""
    example = [{"role": "user", "content": "What is 4 + 5?"}, {"role": "assistant", "content": "9"}]
    for place, (ask, answer) in enumerate(_dialogs(rng, count)):
        sentence = f"You asked me: {ask['content']} It is {answer['content']}."
        yield [*example, ask, {**answer, "content": sentence} if place % 2 else answer]


def _declare(folder: Path, name: str, splits: Sequence[str]) -> None:
    """Add a configuration to the data set of a folder."""
    readme = folder / "README.md"
    known = readme.read_text().removesuffix("---\n") if readme.is_file() else "---\nconfigs:\n"
    if f"config_name: {name}\n" in known:
        return
    files = "".join(f"  - split: {each}\n    path: {each}.jsonl\n" for each in splits)
    readme.write_text(f"{known}- config_name: {name}\n  data_files:\n{files}---\n")


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", nargs="*", help="names of recipes; default: all")
    parser.add_argument("--model", type=Path, default=Path("byte"), help="folder of the model")
    parser.add_argument("--folder", type=Path, default=Path("recipes"), help="receives all files")
    parser.add_argument("--learning-rate", type=float, help="replaces that of the recipes named")
    parser.add_argument("--base-models", metavar="FOLDER", help="print the options of `up`")
    return parser.parse_args()


if __name__ == "__main__":
    main()
