"""Commands that change a run, and their results as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, Literal

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.rules import changed_settings
from turnstream.errors import InvalidConfigError
from turnstream.records.configs import decode_config, encode_config
from turnstream.store.client.connection import connect
from turnstream.store.run.configs import open_run, read_revisions, revise_config
from turnstream.store.run.runs import close_run, create_run, pause_run, reopen_run, resume_run
from turnstream_server.ledger.planning.announcements import await_replan, request_replan
from turnstream_server.ledger.queries.run_facts import setting_text
from turnstream_server.ledger.sessions import observers

RunCommand = Literal["close", "reopen", "pause", "resume"]


def create(url: str, run: str, settings: Sequence[str], config_file: Path | None) -> str:
    """Create a run, or accept it with the same settings; return its name.

    `settings` ("name=value" each) change those of the file.
    """
    if config_file is not None:
        config = with_settings(decode_config(config_file.read_text(encoding="utf-8")), settings)
    else:
        config = _first_config(settings)
    with connect(url) as client:
        create_run(client, run, config)
        return open_run(client, run)


def _first_config(settings: Sequence[str]) -> BatchingConfig:
    """Return a config from the settings alone; an update takes all groups of a step."""
    given = {name: text for name, _, text in (each.partition("=") for each in settings)}
    if "batch_groups" not in given:
        raise InvalidConfigError(
            "batch_groups", "it is missing; write --set batch_groups=8: the groups of one step"
        )
    first = BatchingConfig(batch_groups=1, mini_batch_groups=1)
    return with_settings(first, [f"mini_batch_groups={given['batch_groups']}", *settings])


def revise_run(url: str, run: str, settings: Sequence[str], *, from_step: int) -> Iterator[str]:
    """Revise the last config of a run, and yield a line for each change."""
    with connect(url) as client:
        run = open_run(client, run)
        before = read_revisions(client, run).last
        after = with_settings(before.config, settings)
        number = revise_config(client, run, after, from_step=from_step)
    changes = changed_settings(before.config, after)
    if not changes:
        yield f"nothing changes: revision {number} says the same"
        return
    yield f"revision {number} of run {run}, from step {from_step} on:"
    for change in changes:
        yield f"  {change.name}: {setting_text(change.before)} -> {setting_text(change.after)}"


_OPERATIONS: Final[dict[RunCommand, tuple[Callable[..., bool], str, str]]] = {
    "close": (close_run, "is closed", "was closed before"),
    "reopen": (reopen_run, "takes groups again", "was not closed"),
    "pause": (pause_run, "is paused", "was paused before"),
    "resume": (resume_run, "is resumed", "was not paused"),
}
"""Each command with its result: the state has changed, or it was so before."""


def change_state(url: str, run: str, command: RunCommand, **options: Any) -> str:
    """Close, reopen, pause or resume a run; return the result in words."""
    change, changed, unchanged = _OPERATIONS[command]
    with connect(url) as client:
        run = open_run(client, run)
        return f"run {run} {changed if change(client, run, **options) else unchanged}"


def remove_observer(url: str, run: str, observer: str) -> str:
    """Remove an observer of a run; return the result in words."""
    with connect(url) as client:
        run = open_run(client, run)
        if observers.remove_observer(client, run, observer):
            return f"observer {observer!r} of run {run} is removed: no step is kept for it"
        known = ", ".join(repr(each.name) for each in observers.read_observers(client, run))
    raise InvalidConfigError("observer", f"run {run} has no {observer!r}; it has {known or 'none'}")


def with_settings(config: BatchingConfig, settings: Sequence[str]) -> BatchingConfig:
    """Return the config with other values, given as text.

    >>> config = BatchingConfig(batch_groups=2, mini_batch_groups=2)
    >>> with_settings(config, ["max_staleness=3", "estimator=rloo"]).estimator
    'rloo'
    """
    stored: dict[str, Any] = json.loads(encode_config(config))
    names = {field.name for field in fields(BatchingConfig)}
    for setting in settings:
        name, is_given, text = setting.partition("=")
        if not is_given:
            raise InvalidConfigError("--set", f"{setting!r} is not NAME=VALUE")
        if name not in names:
            raise InvalidConfigError(name, "is no setting of a run")
        stored[name] = text if isinstance(stored[name], str) else _value(text)
    return decode_config(json.dumps(stored))


def _value(text: str) -> Any:
    """Return the value of a JSON text; any other text is returned as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def replan(url: str, run: str, *, wait_s: float) -> str:
    """Have the batcher plan again from the first damaged step on; return the steps as text."""
    with connect(url) as client:
        run = open_run(client, run)
        return await_replan(client, run, request_replan(client, run), wait_s=wait_s)
