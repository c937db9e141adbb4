"""Commands close, reopen, pause, resume, replan and revise: effect, output and refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import redis

from harness.stored import content_of
from testkit import wait_until
from turnstream.batching.config import GroupFilter
from turnstream.store.client import keys
from turnstream.store.run.configs import read_revisions
from turnstream_server import cli
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.core.frontier import read_frontier

pytestmark = pytest.mark.redis


class Told(NamedTuple):
    """What a command said, and its status."""

    status: int
    out: str
    err: str


class Shell:
    """Types commands in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *words: str) -> Told:
        """Type one."""
        self._monkeypatch.setattr(sys, "argv", ["turnstream", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        seen = self._capsys.readouterr()
        return Told(int(ended.value.code or 0), seen.out, seen.err)


@pytest.fixture
def turnstream(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    """Types commands for the store of the tests."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", server.url)
    return Shell(monkeypatch, capsys)


@pytest.fixture
def run(client: redis.Redis, new_run: Callable[..., str]) -> str:
    """The name of a new run."""
    return new_run(client, batch_groups=4, max_staleness=1)


def content(client: redis.Redis, run: str) -> dict[str, object]:
    """All that is stored of it."""
    return {name: content_of(client, name) for name in keys.run_keys(run)}


def test_close_ends_a_run_once_and_reopen_opens_it_once(
    client: redis.Redis, run: str, turnstream: Shell
) -> None:
    unknown = turnstream("run", "close", run, "--leftover", "keep")
    was_open = not read_frontier(client, run).is_closed
    closed = turnstream("run", "close", run, "--leftover", "carry", "--reason", "enough")
    again = turnstream("run", "close", run)
    other = turnstream("run", "close", run, "--leftover", "drop")
    stored = client.hmget(keys.run_keys(run).frontier, "closed", "leftover")
    reopened, open_before = (turnstream("run", "reopen", run) for _ in range(2))

    assert unknown == Told(1, "", "error: leftover: 'keep' is not one of short, carry, drop\n")
    assert was_open
    assert closed == Told(0, f"run {run} is closed\n", "")
    assert other == Told(1, "", "error: the run was closed with leftover=carry, not drop\n")
    assert again == Told(0, f"run {run} was closed before\n", "")
    assert stored == [b"1", b"carry"]
    assert reopened == Told(0, f"run {run} takes groups again\n", "")
    assert open_before == Told(0, f"run {run} was not closed\n", "")
    assert not read_frontier(client, run).is_closed


def test_pause_keeps_the_first_reason_until_resume(
    client: redis.Redis, run: str, turnstream: Shell
) -> None:
    not_paused = turnstream("run", "resume", run)
    paused = turnstream("run", "pause", run, "--reason", "the disk is full")
    again = turnstream("run", "pause", run, "--reason", "another")
    reason = read_frontier(client, run).paused
    why = json.loads(turnstream("why", run, "--json").out)["reasons"][0]
    resumed = turnstream("run", "resume", run)

    assert not_paused == Told(0, f"run {run} was not paused\n", "")
    assert paused == Told(0, f"run {run} is paused\n", "")
    assert again == Told(0, f"run {run} was paused before\n", "")
    assert resumed == Told(0, f"run {run} is resumed\n", "")
    assert (reason, read_frontier(client, run).paused) == ("the disk is full", None)
    assert (why["kind"], why["facts"]) == ("run_paused", {"reason": "the disk is full"})


def test_replan_prints_the_withdrawn_steps_as_text_and_json(
    client: redis.Redis, run: str, turnstream: Shell
) -> None:
    answered = '{"done": "steps 3 to 4; damaged trajectories: 1"}'
    names = keys.run_keys(run)

    def answer() -> None:
        """Answer as a leader does."""
        request = wait_until(lambda: read_frontier(client, run).replan)
        client.hset(names.frontier, "replanned", f"{request}:{answered}")
        client.hdel(names.frontier, "replan")

    with ThreadPoolExecutor() as pool:
        pool.submit(answer)
        told = turnstream("run", "replan", run)
        pool.submit(answer)
        as_json = turnstream("run", "replan", run, "--json")
    alone = turnstream("run", "replan", run, "--wait-s", "0")

    assert alone.status == 1
    assert "no batcher has answered within 0 s; the request is kept" in alone.err
    assert read_frontier(client, run).replan
    assert told == Told(0, "planned again: steps 3 to 4; damaged trajectories: 1\n", "")
    assert json.loads(as_json.out) == {"run": run, "steps": json.loads(answered)["done"]}


def test_revise_prints_each_change_and_show_prints_it_as_pending(
    client: redis.Redis, run: str, turnstream: Shell
) -> None:
    words = ("--set", "max_staleness=3", "--set", "estimator=rloo", "--from-step", "2")

    told = turnstream("run", "revise", run, *words)
    again = turnstream("run", "revise", run, *words)
    shown = turnstream("run", "show", run)

    assert told.status == 0
    assert told.out.splitlines() == [
        f"revision 2 of run {run}, from step 2 on:",
        "  estimator: grpo -> rloo",
        "  max_staleness: 1 -> 3",
    ]
    assert again == Told(0, "nothing changes: revision 2 says the same\n", "")
    assert "revision 2, from step 2" in shown.out
    assert "estimator=rloo, max_staleness=3" in shown.out
    last = read_revisions(client, run).last
    assert (last.from_step, last.config.max_staleness, last.config.estimator) == (2, 3, "rloo")
    given = '[{"kind": "mean_range", "metric": "accuracy", "low": 0.25}]'
    told = turnstream("run", "revise", run, "--set", f"group_filters={given}", "--from-step", "2")
    filters = read_revisions(client, run).last.config.group_filters
    assert filters == (GroupFilter(kind="mean_range", metric="accuracy", low=0.25),)
    for text in (told.out, turnstream("run", "show", run).out):
        assert '"kind": "mean_range", "metric": "accuracy"' in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "max_stale=3"), "max_stale: is no setting of a run"),
        (("--set", "max_staleness"), "--set: 'max_staleness' is not NAME=VALUE"),
        (
            ("--set", "max_staleness=many"),
            "max_staleness: 'many' is not a whole number of at least 0",
        ),
        (("--set", "aggregation=sum"), "aggregation: "),
    ],
)
def test_revise_names_the_wrong_setting_and_its_value(
    client: redis.Redis, run: str, turnstream: Shell, words: tuple[str, ...], message: str
) -> None:
    before = content(client, run)

    told = turnstream("run", "revise", run, *words, "--from-step", "2")

    assert (told.status, told.out) == (1, "")
    assert told.err.startswith(f"error: {message}")
    assert len(told.err.splitlines()) == 1
    assert content(client, run) == before


@pytest.mark.parametrize(
    "words",
    [
        *(("run close",), ("run reopen",), ("run pause",), ("run resume",), ("run show",)),
        *(("ledger",), ("why",), ("status",)),
        ("run revise", "--set", "max_staleness=3", "--from-step", "2"),
    ],
    ids=lambda words: words[0],
)
def test_commands_name_a_missing_run(
    client: redis.Redis, turnstream: Shell, words: tuple[str, ...]
) -> None:
    told = turnstream(*words[0].split(), "mace", *words[1:])

    error = "error: no run named 'mace': it was deleted, or not created yet\n"
    assert told == Told(1, "", error)
    assert client.exists(*keys.run_keys("mace")) == 0
