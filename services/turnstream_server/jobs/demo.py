"""`turnstream demo`: the whole path live, a small model that learns to guess a number."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from turnstream.store.client.connection import connect
from turnstream.store.run.runs import close_run, create_run
from turnstream_server.bus.core.stores import open_store
from turnstream_server.generators.environments.guessing import GuessingGame
from turnstream_server.generators.environments.preset import GuessingPreset
from turnstream_server.jobs.history import RunHistory
from turnstream_server.jobs.progress import ProgressDisplay, ProgressView
from turnstream_server.jobs.services import (
    start_batcher,
    start_live_generator,
    start_trainer,
    store_environment,
)
from turnstream_server.jobs.stack import Service, Stack, job_folder
from turnstream_server.jobs.summary import Summary, summary_table
from turnstream_server.settings import Settings, mask_password
from turnstream_server.trainer.config import ObjectiveConfig, OptimizerConfig, TrainerConfig

SHARE_OF_BEST = 0.6
"""The mean reward to reach, as a share of the best policy's."""

_NEXT = "next: `turnstream up` starts a store and a batcher for your own generator and trainer"
_REFRESH_S = 0.5
_CLOSING_S = 45.0
_MIN_TRAJECTORIES = 2_560
"""Below it a tenth is less than 256 games, and luck alone could end the job."""

_MARGIN = 1.02
"""Factor above the goal at which the job ends: games under way still count after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of `turnstream demo`; see its command line for the meaning."""

    folder: Path
    json_path: Path | None = None
    max_seconds: float = 300.0
    seed: int = 0
    num_generators: int = 2


class Verdict(NamedTuple):
    """Whether the policy has learned, and in words.

    `goal` is the mean reward that the last tenth has to reach; None before the first reward.
    """

    has_learned: bool
    goal: float | None
    words: str


def run_demo(settings: Settings, options: DemoOptions, console: Console) -> int:
    """Train until the reward has risen; prints the summary and writes it.

    Returns:
        0 if the policy has learned, 1 if it has not.
    """
    preset = GuessingPreset()
    run = f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    with (
        job_folder(options.folder, job="demo") as folder,
        open_store(settings.model_copy(update={"data_dir": folder / "store"})) as url,
        connect(url) as client,
        Stack(folder, store_environment(url)) as stack,
    ):
        create_run(client, run, preset.batching())
        console.print(introduction(preset.game, url=url, run=run), soft_wrap=True, highlight=False)
        services = _start_services(stack, preset, options, run=run)
        history = RunHistory(client, run)
        try:
            _watch(stack, history, preset.game, options, console)
        except KeyboardInterrupt:
            console.print(summary_table(history.summary(), title="demo, interrupted"))
            raise
        close_run(client, run, "the demo is over")
        stack.wait_for_all(services, timeout_s=_CLOSING_S)
        summary = history.summary()
    status = _report(summary, preset.game, options, console)
    console.print(_NEXT, soft_wrap=True, highlight=False)
    return status


def introduction(game: GuessingGame, *, url: str, run: str) -> str:
    """Return the lines before the first step: the store, the run, and the meaning of a reward."""
    address = mask_password(url)
    found = f"a number from 1 to {game.num_numbers} in {game.max_guesses} guesses"
    return (
        f"store   {address}\n"
        f"run     {run}\n"
        f"reward  1 if the model finds {found}, else 0; the best policy reaches "
        f"{game.best_mean_reward:g}\n"
        f"look    turnstream status {run} --watch --redis {address}"
    )


def _watch(
    stack: Stack,
    history: RunHistory,
    game: GuessingGame,
    options: DemoOptions,
    console: Console,
) -> None:
    """Show the progress until the policy has learned, or the time is up."""
    with ProgressDisplay(console) as display:
        for elapsed_s in stack.watch(timeout_s=options.max_seconds, every_s=_REFRESH_S):
            summary = history.summary()
            display.show(_view(summary, game, elapsed_s=elapsed_s))
            if _may_stop(summary, game):
                break


def judge(summary: Summary, *, best_reward: float) -> Verdict:
    """Whether the mean reward has doubled and reached its share of the best policy's."""
    first, last = summary.reward_first_tenth, summary.reward_last_tenth
    if first is None or last is None:
        return Verdict(False, None, "no game was finished")
    goal = max(2 * first, SHARE_OF_BEST * best_reward)
    reached = f"mean reward {last:.3f} in the last tenth, {first:.3f} in the first"
    wanted = f"wanted: {goal:.3f} (twice the first tenth, and {SHARE_OF_BEST} of {best_reward:g})"
    return Verdict(last >= goal, goal, f"{reached}; {wanted}")


def _may_stop(summary: Summary, game: GuessingGame) -> bool:
    verdict = judge(summary, best_reward=game.best_mean_reward)
    if verdict.goal is None or summary.reward_last_tenth is None:
        return False
    is_enough = summary.trajectories >= _MIN_TRAJECTORIES
    return is_enough and summary.reward_last_tenth >= _MARGIN * verdict.goal


def _view(summary: Summary, game: GuessingGame, *, elapsed_s: float) -> ProgressView:
    goal = judge(summary, best_reward=game.best_mean_reward).goal
    share = 0.0 if not goal else (summary.reward_last_tenth or 0.0) / goal
    return ProgressView(share=share, elapsed_s=elapsed_s, summary=summary, goal=goal)


def _report(summary: Summary, game: GuessingGame, options: DemoOptions, console: Console) -> int:
    verdict = judge(summary, best_reward=game.best_mean_reward)
    console.print(summary_table(summary, title="demo"))
    if options.json_path is not None:
        options.json_path.write_text(summary.to_json(), encoding="utf-8")
    outcome = "learned" if verdict.has_learned else "not learned"
    console.print(f"{outcome}: {verdict.words}", soft_wrap=True)
    return 0 if verdict.has_learned else 1


def _start_services(
    stack: Stack, preset: GuessingPreset, options: DemoOptions, *, run: str
) -> Sequence[Service]:
    batcher = start_batcher(stack, name="batcher")
    trainer = start_trainer(
        stack,
        TrainerConfig(
            run=run,
            batcher_target=batcher.address,
            policy=preset.policy(seed=options.seed),
            folder=stack.folder / "trainer",
            optimizer=OptimizerConfig(learning_rate=preset.learning_rate),
            objective=ObjectiveConfig(temperature=preset.temperature),
            num_threads=1,
            seed=options.seed,
        ),
    )
    generators = [
        start_live_generator(
            stack,
            preset,
            run=run,
            writer=f"live-{number}",
            groups_per_round=max(1, preset.batch_groups // options.num_generators),
            seed=options.seed * options.num_generators + number,
            num_threads=1,
        )
        for number in range(options.num_generators)
    ]
    return [trainer, *generators]
