"""Results of a training: metrics of its steps, to plot, and its evaluations.

The metrics are those in the file of a trainer, or the rewards of a run in the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from rich.console import Console

from turnstream.errors import InvalidConfigError, RunNotFoundError, StoreUnavailableError
from turnstream.records.tag_statistics import shown_figures
from turnstream.store.client.connection import connect
from turnstream.store.client.run_ids import find_run
from turnstream.store.run.configs import open_run, read_config
from turnstream.store.run.evals import eval_results
from turnstream.store.run.runs import newest_version
from turnstream.types import EvalGroup, EvalResult, Spread
from turnstream_server.console.store_client import store_client
from turnstream_server.ledger.queries.run_facts import reward_curve
from turnstream_server.screen import make_table, print_figures
from turnstream_server.settings import mask_password
from turnstream_server.trainer.reporting.sinks import FILE_NAME, read_steps

_ARGUMENT: Final = "FOLDER_OR_RUN"

_JOB_FOLDER: Final = "trainer"
"""Folder of the trainer in that of a job, such as the demo."""


class StepMetrics(NamedTuple):
    """Metrics by step, in order, and the name of their source."""

    source: str
    steps: list[dict[str, Any]]


def read_metrics(source: str, *, redis_url: str) -> StepMetrics:
    """Return the metrics of a training.

    A run whose trainer has no file on this machine has its mean rewards alone, from the plans and
    the records of released batches.

    Args:
        source: folder of a trainer or of a job, a file of metrics, or a run.
        redis_url: store of the run.

    Raises:
        InvalidConfigError: there is no such folder or run, or it has no complete step.
    """
    path = find_metrics(source, redis_url=redis_url)
    if path is not None:
        found = StepMetrics(str(path), read_steps(path))
    else:
        with store_client(redis_url) as client:
            steps = reward_curve(client, open_run(client, source))
        found = StepMetrics(f"the batches of run {source}", steps)
    if not found.steps:
        raise InvalidConfigError(_ARGUMENT, f"{found.source} has no complete step yet")
    return found


def find_metrics(source: str, *, redis_url: str) -> Path | None:
    """Return the file of metrics of a training; None for a run without one on this machine."""
    path = Path(source)
    if path.is_file():
        return path
    if not path.exists():
        folder = _trainer_of(source, redis_url)
        found = None if folder is None else folder / FILE_NAME
        return found if found is not None and found.is_file() else None
    folders = [path, path / _JOB_FOLDER]
    for folder in folders:
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
    tried = " or ".join(str(folder / FILE_NAME) for folder in folders)
    raise InvalidConfigError(_ARGUMENT, f"{source} has no metrics: there is no file {tried}")


def _trainer_of(run: str, redis_url: str) -> Path | None:
    """Return the folder of the trainer that announced the newest weights of a run, or None."""
    store = mask_password(redis_url)
    try:
        with connect(redis_url) as client:
            run_id = find_run(client, run)
            read_config(client, run_id)  # else a run that does not exist has no version
            newest = newest_version(client, run_id)
    except (InvalidConfigError, RunNotFoundError, StoreUnavailableError) as error:
        message = f"{run!r} is neither a folder nor a run of {store}: {error}"
        raise InvalidConfigError(_ARGUMENT, message) from error
    address = urlsplit(newest.weights_uri if newest else "")
    path = Path(unquote(address.path))
    return path.parents[1] if address.scheme == "file" and len(path.parents) > 1 else None


_NONE = {"mean": None, "std": None}


def read_evals(url: str, run: str) -> list[dict[str, Any]]:
    """Return the results of every version in plain values, with the groups that are kept."""
    with store_client(url) as client:
        return [
            {
                **_facts(result, "version", "num_groups"),
                "best": _spread(result.best),
                "figures": shown_figures(result.figures),
                "groups": [
                    {**_facts(group, "group_id", "prompt_uid"), "best": group.best}
                    for group in result.groups
                ],
            }
            for result in eval_results(client, run)
        ]


def print_evals(run: str, results: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a line for each version of the weights, and tags and metrics of the newest."""
    columns = ("version", "groups", "trajectories", "lost", "mean reward", "std", "best of n")
    rows = [
        (
            "unknown" if each["version"] is None else str(each["version"]),
            *(each["num_groups"], each["num_trajectories"], each["num_lost"]),
            *((each["reward"] or _NONE)[name] for name in ("mean", "std")),
            (each["best"] or _NONE)["mean"],
        )
        for each in results
    ]
    console.print(make_table(columns, rows, title=f"evaluations of {run}"))
    if results and results[-1]["figures"]:
        console.print(f"version {results[-1]['version']}:")
        print_figures(results[-1]["figures"], console)


def _facts(found: EvalResult | EvalGroup, *names: str) -> dict[str, Any]:
    """Return these fields, the numbers of trajectories and the rewards."""
    values = {name: getattr(found, name) for name in (*names, "num_trajectories", "num_lost")}
    return {**values, "reward": _spread(found.reward)}


def _spread(spread: Spread) -> dict[str, Any] | None:
    return {"num": spread.num, "mean": spread.mean, "std": spread.std} if spread.num else None
