from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testkit import config
from turnstream.errors import ConflictError, InvalidConfigError, RunNotFoundError
from turnstream.records.evals import encode_evaluation
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.rewards import post_reward
from turnstream.store.run.runs import close_run, create_run
from turnstream.types import EvalResult, Spread, TrajectoryKey
from turnstream_server import cli


def test_run_list_shows_every_run_and_never_truncates_a_name(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "qwen3-8b-grpo-2026-11-23-seed-17-lr-1e-6-maze-with-tools-and-a-long-name"
    with connect(url) as client:
        for run in ("maze", "guess it/2", name):
            create_run(client, run, config())
        close_run(client, "maze")

    shown = CliRunner().invoke(cli.app, ["run", "list"])
    as_json = CliRunner().invoke(cli.app, ["run", "list", "--json"])

    lines = [line.split() for line in shown.output.splitlines()]
    assert [line[:3] for line in lines[1:]] == [
        ["guess", "it/2", "open"],
        ["maze", "closed", "0"],
        [name, "open", "0"],
    ]
    states = {each["run"]: each["state"] for each in json.loads(as_json.output)}
    assert states == {"guess it/2": "open", "maze": "closed", name: "open"}


def test_created_run_has_its_settings_and_may_be_created_again(url: str) -> None:
    words = ["run", "create", "maze", "--set", "batch_groups=8", "--set", "estimator=rloo"]

    first = CliRunner().invoke(cli.app, words)
    again = CliRunner().invoke(cli.app, words)
    shown = CliRunner().invoke(cli.app, ["run", "show", "maze", "--json"])
    other = CliRunner().invoke(cli.app, ["run", "create", "maze", "--set", "batch_groups=4"])

    assert (first.output, again.output) == ("run maze is ready\n", "run maze is ready\n")
    settings = json.loads(shown.output)["settings"]
    assert (settings["batch_groups"], settings["mini_batch_groups"]) == (8, 8)
    assert settings["estimator"] == "rloo"
    assert isinstance(other.exception, ConflictError)
    assert "batch_groups is 8, not 4; mini_batch_groups is 8, not 4; " in str(other.exception)
    assert "estimator is 'rloo', not 'grpo'" in str(other.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "batch_groups: it is missing; write --set batch_groups=8"),
        (["--set", "batch_groups=many"], "batch_groups: 'many' is not a whole number"),
        (["--set", "batch_groups=8", "--set", "estimater=rloo"], "estimater: is no setting"),
    ],
)
def test_create_names_the_wrong_setting(url: str, words: list[str], message: str) -> None:
    done = CliRunner().invoke(cli.app, ["run", "create", "maze", *words])

    assert isinstance(done.exception, InvalidConfigError)
    assert message in str(done.exception)
    assert "no runs" in CliRunner().invoke(cli.app, ["run", "list"]).output


def test_delete_asks_for_the_name_again_and_runs_shows_what_was_interrupted(url: str) -> None:
    with connect(url) as client:
        create_run(client, "maze", config())
        create_run(client, "half", config())
        client.hset(keys.run_keys("half").deleted, mapping={"since_ms": 1, "fence_ms": 1})
        client.delete(keys.run_keys("half").frontier, keys.run_keys("half").config)

    kept = CliRunner().invoke(cli.app, ["run", "delete", "maze"], input="maza\n")
    shown = CliRunner().invoke(cli.app, ["run", "list"])
    deleted = CliRunner().invoke(cli.app, ["run", "delete", "maze"], input="maze\n")
    finished = CliRunner().invoke(cli.app, ["run", "delete", "half", "--yes"])

    assert (kept.exit_code, deleted.exit_code, finished.exit_code) == (1, 0, 0)
    assert "nothing was deleted" in kept.output
    rows = [line.split() for line in shown.output.splitlines()]
    assert any("maze" in row and "open" in row for row in rows)
    assert any("half" in row and "deleted" in row for row in rows)
    assert "deleted maze; the name can be used again" in deleted.output
    assert CliRunner().invoke(cli.app, ["run", "list"]).output.startswith("no runs ")


def test_commands_of_a_name_show_its_newest_run(url: str) -> None:
    with connect(url) as client:
        create_run(client, "maze", config(batch_groups=6, mini_batch_groups=3))
    first = CliRunner().invoke(cli.app, ["run", "delete", "maze", "--yes"])
    with connect(url) as client:
        create_run(client, "maze", config(batch_groups=9, mini_batch_groups=3))

    shown = CliRunner().invoke(cli.app, ["run", "show", "maze"])
    listed = CliRunner().invoke(cli.app, ["run", "list"])
    closed = CliRunner().invoke(cli.app, ["run", "close", "maze"])
    counted = CliRunner().invoke(cli.app, ["ledger", "maze", "--json"])
    second = CliRunner().invoke(cli.app, ["run", "delete", "maze", "--yes"])
    third = CliRunner().invoke(cli.app, ["run", "delete", "maze", "--yes"])

    assert first.output == "deleted maze; the name can be used again\n"
    assert "maze~2" in shown.output
    assert ["*", "batch_groups", "9"] in [row.split() for row in shown.output.splitlines()]
    assert [row.split()[0] for row in listed.output.splitlines()[1:]] == ["maze~2"]
    assert closed.output == "run maze~2 is closed\n"
    assert counted.exit_code == 0
    assert second.output == "deleted maze~2; the name can be used again\n"
    assert isinstance(third.exception, RunNotFoundError)
    assert CliRunner().invoke(cli.app, ["run", "list"]).output.startswith("no runs ")


def reasons_of(run: str) -> list[dict[str, Any]]:
    shown = CliRunner().invoke(cli.app, ["why", run, "--json"])
    assert shown.exit_code == 0
    return json.loads(shown.output)["reasons"]


def test_ledger_counts_the_rewards_that_came_too_late(url: str) -> None:
    with connect(url) as client:
        create_run(client, "maze", config())
        before = CliRunner().invoke(cli.app, ["ledger", "maze"])
        client.hset(keys.run_keys("maze").groups, "g", "2:filtered")
        post_reward(client, "maze", TrajectoryKey("g", 0), 1.0)

    shown = CliRunner().invoke(cli.app, ["ledger", "maze"])
    told = CliRunner().invoke(cli.app, ["ledger", "maze", "--json"])

    assert "rewards came" not in before.output
    assert "1 rewards came after their groups were decided" in shown.output
    assert json.loads(told.output)["late_rewards"] == 1


def test_why_reports_an_idle_and_a_finished_run(url: str) -> None:
    with connect(url) as client:
        create_run(client, "maze", config())
        idle = reasons_of("maze")
        close_run(client, "maze")

    assert [each["kind"] for each in idle] == ["batcher_away", "too_few_ready"]
    assert [each["kind"] for each in reasons_of("maze")] == ["run_closed"]


def test_evals_prints_a_line_for_each_version(url: str) -> None:
    result = EvalResult(version=7, num_groups=2, num_trajectories=4, reward=Spread(num=4, mean=0.5))
    with connect(url) as client:
        create_run(client, "maze", config())
        client.hset(keys.run_keys("maze").evals, "7", encode_evaluation(result))

    shown = CliRunner().invoke(cli.app, ["evals", "maze"])
    as_json = CliRunner().invoke(cli.app, ["evals", "maze", "--json"])

    assert re.search(r"7 +│ 2 +│ 4 +│ 0 +│ 0.5 +│ 0 +│", shown.output)
    assert json.loads(as_json.output)[0]["reward"] == {"num": 4, "mean": 0.5, "std": 0.0}


@pytest.mark.parametrize("words", [["up"], ["demo"], ["run", "list"]], ids=" ".join)
def test_command_refuses_the_address_of_a_gateway(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("BATCHER_PORT", "HTTP_PORT"):
        monkeypatch.setenv(f"TURNSTREAM_{name}", "0")
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", "http://:tml-secret@127.0.0.1:7601")

    error = CliRunner().invoke(cli.app, words).exception

    assert isinstance(error, InvalidConfigError)
    assert str(error) == (
        "TURNSTREAM_REDIS_URL: http://127.0.0.1:7601 is a gateway, and the server needs the store "
        "itself: write redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH"
    )
