"""`turnstream demo`: the whole path live, a small model that learns to guess a number."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from turnstream.store.run.runs import close_run
from turnstream_server.console.summary import Summary, summary_table
from turnstream_server.generators.guessing import MAX_GUESSES, NUM_NUMBERS, preset_config
from turnstream_server.launch.job import Job, report, training_job
from turnstream_server.launch.stack import Service
from turnstream_server.options import DemoOptions
from turnstream_server.settings import Settings, mask_password

_NEXT = "next: `turnstream up` starts store, batcher and gateway for your own generator and trainer"
_CLOSING_S = 45.0
_MIN_TRAJECTORIES = 2_560
"""Below it a tenth is less than 256 games, and luck alone could end the job."""

_MARGIN = 1.02
"""Factor above the goal at which the job ends: games under way still count after that."""


def run_demo(settings: Settings, options: DemoOptions, console: Console) -> int:
    """Train until the reward has risen; print the summary and write it.

    Returns:
        0 if the policy has learned, 1 if it has not.
    """
    config = preset_config()
    with training_job(settings, options.folder, kind="demo", config=config) as job:
        console.print(introduction(job), soft_wrap=True, highlight=False)
        services = _start_services(job, options, groups=config.batch_groups)
        try:
            _watch(job, options, console)
        except KeyboardInterrupt:
            console.print(summary_table(job.history.summary(), title="demo, interrupted"))
            raise
        close_run(job.client, job.run, "the demo is over")
        job.stack.wait_for_all(services, timeout_s=_CLOSING_S)
        summary = job.history.summary()
    report(summary, console, title="demo", json_path=options.json_path)
    has_learned, words = judge(summary, least=options.goal)
    console.print(f"{'learned' if has_learned else 'not learned'}: {words}", soft_wrap=True)
    console.print(f"plot: {plot_command(options.folder)}", soft_wrap=True, highlight=False)
    console.print(_NEXT, soft_wrap=True, highlight=False)
    return 0 if has_learned else 1


def plot_command(folder: Path) -> str:
    """Return the command that draws the metrics of the demo in a folder.

    >>> plot_command(Path("my demo"))
    "`turnstream plot 'my demo' --out plot.png` draws reward, loss, KL and tokens/s"
    """
    words = shlex.join(["turnstream", "plot", str(folder), "--out", "plot.png"])
    return f"`{words}` draws reward, loss, KL and tokens/s"


def introduction(job: Job) -> str:
    """Return the lines before the first step: the store, the run, and the meaning of a reward."""
    address = mask_password(job.url)
    found = f"a number from 1 to {NUM_NUMBERS} in {MAX_GUESSES} guesses"
    return (
        f"store   {address}\n"
        f"run     {job.run}\n"
        f"reward  1 if the model finds {found}, else 0; the best policy reaches 1\n"
        f"look    turnstream status {job.run} --watch --redis {address}"
    )


def _watch(job: Job, options: DemoOptions, console: Console) -> None:
    """Show the progress until the policy has learned, or the time is up."""
    find = functools.partial(goal_of, least=options.goal)
    for summary in job.watch(console, timeout_s=options.max_seconds, goal=find):
        goal, last = find(summary), summary.reward_last_tenth or 0.0
        if goal and summary.trajectories >= _MIN_TRAJECTORIES and last >= _MARGIN * goal:
            break


def goal_of(summary: Summary, *, least: float) -> float | None:
    """Return the mean reward that the last tenth has to reach; None before the first reward.

    It is at least `least`; the best policy reaches 1.
    """
    first = summary.reward_first_tenth
    return None if first is None else min(1.0, max(2 * first, least))


def judge(summary: Summary, *, least: float) -> tuple[bool, str]:
    """Return whether the policy has learned, and the reason."""
    first, last = summary.reward_first_tenth, summary.reward_last_tenth
    goal = goal_of(summary, least=least)
    if first is None or last is None or goal is None:
        return False, "no game was finished"
    reached = f"mean reward {last:.3f} in the last tenth, {first:.3f} in the first"
    wanted = f"{goal:.3f} (twice the first tenth, and at least {least})"
    return last >= goal, f"{reached}; wanted: {wanted}"


def _start_services(job: Job, options: DemoOptions, *, groups: int) -> Sequence[Service]:
    """Start batcher, trainer and generators; return the last two kinds."""
    stack, run, num_generators = job.stack, job.run, options.num_generators
    trainer = stack.start(
        "trainer",
        "trainer",
        preset="guessing",
        run=run,
        batcher=stack.start_batcher().address,
        folder=stack.folder / "trainer",
        threads=1,
        seed=options.seed,
        lora_rank=options.lora_rank,
        **({"lora_layers": "attention,mlp,unembedding"} if options.lora_rank else {}),
    )
    generators = [
        stack.start(
            "generator",
            f"live-{number}",
            run=run,
            writer=f"live-{number}",
            round=max(1, groups // num_generators),
            seed=options.seed * num_generators + number,
            threads=1,
        )
        for number in range(num_generators)
    ]
    return [trainer, *generators]
