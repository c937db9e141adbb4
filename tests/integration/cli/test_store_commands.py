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


def invoke(words: str, *others: str, **options: Any) -> Any:
    """Return the result of `turnstream <words> <others>`."""
    return CliRunner().invoke(cli.app, [*words.split(), *others], **options)


def test_run_list_shows_every_run_and_never_truncates_a_name(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "qwen3-8b-grpo-2026-11-23-seed-17-lr-1e-6-maze-with-tools-and-a-long-name"
    with connect(url) as client:
        for run in ("maze", "guess it/2", name):
            create_run(client, run, config())
        close_run(client, "maze")

    shown = invoke("run list")
    as_json = invoke("run list --json")

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

    first = invoke("", *words)
    again = invoke("", *words)
    shown = invoke("run show maze --json")
    other = invoke("run create maze --set batch_groups=4")

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
    done = invoke("run create maze", *words)

    assert isinstance(done.exception, InvalidConfigError)
    assert message in str(done.exception)
    assert "no runs" in invoke("run list").output


def test_delete_asks_for_the_name_again_and_runs_shows_what_was_interrupted(url: str) -> None:
    with connect(url) as client:
        create_run(client, "maze", config())
        create_run(client, "half", config())
        client.hset(keys.run_keys("half").deleted, mapping={"since_ms": 1, "fence_ms": 1})
        client.delete(keys.run_keys("half").frontier, keys.run_keys("half").config)

    kept = invoke("run delete maze", input="maza\n")
    shown = invoke("run list")
    deleted = invoke("run delete maze", input="maze\n")
    finished = invoke("run delete half --yes")

    assert (kept.exit_code, deleted.exit_code, finished.exit_code) == (1, 0, 0)
    assert "nothing was deleted" in kept.output
    rows = [line.split() for line in shown.output.splitlines()]
    assert any("maze" in row and "open" in row for row in rows)
    assert any("half" in row and "deleted" in row for row in rows)
    assert "deleted maze; the name can be used again" in deleted.output
    assert invoke("run list").output.startswith("no runs ")


def test_commands_of_a_name_show_its_newest_run(url: str) -> None:
    with connect(url) as client:
        create_run(client, "maze", config(batch_groups=6, mini_batch_groups=3))
    first = invoke("run delete maze --yes")
    with connect(url) as client:
        create_run(client, "maze", config(batch_groups=9, mini_batch_groups=3))

    shown = invoke("run show maze")
    listed = invoke("run list")
    closed = invoke("run close maze")
    counted = invoke("ledger maze --json")
    second = invoke("run delete maze --yes")
    third = invoke("run delete maze --yes")

    assert first.output == "deleted maze; the name can be used again\n"
    assert "maze~2" in shown.output
    assert ["*", "batch_groups", "9"] in [row.split() for row in shown.output.splitlines()]
    assert [row.split()[0] for row in listed.output.splitlines()[1:]] == ["maze~2"]
    assert closed.output == "run maze~2 is closed\n"
    assert counted.exit_code == 0
    assert second.output == "deleted maze~2; the name can be used again\n"
    assert isinstance(third.exception, RunNotFoundError)
    assert invoke("run list").output.startswith("no runs ")


def test_ledger_why_and_evals_print_what_the_store_has_of_a_run(url: str) -> None:
    result = EvalResult(version=7, num_groups=2, num_trajectories=4, reward=Spread(num=4, mean=0.5))
    with connect(url) as client:
        create_run(client, "maze", config())
        before = invoke("ledger maze").output
        idle = json.loads(invoke("why maze --json").output)["reasons"]
        client.hset(keys.run_keys("maze").groups, "g", "2:filtered")
        client.hset(keys.run_keys("maze").evals, "7", encode_evaluation(result))
        post_reward(client, "maze", TrajectoryKey("g", 0), 1.0)
        close_run(client, "maze")

    finished = json.loads(invoke("why maze --json").output)["reasons"]

    assert "rewards came" not in before
    assert "1 rewards came after their groups were decided" in invoke("ledger maze").output
    assert json.loads(invoke("ledger maze --json").output)["late_rewards"] == 1
    assert [each["kind"] for each in idle] == ["batcher_away", "too_few_ready"]
    assert [each["kind"] for each in finished] == ["run_closed"]
    assert re.search(r"7 +│ 2 +│ 4 +│ 0 +│ 0.5 +│ 0 +│", invoke("evals maze").output)
    (shown,) = json.loads(invoke("evals maze --json").output)
    assert shown["reward"] == {"num": 4, "mean": 0.5, "std": 0.0}


@pytest.mark.parametrize("words", [["up"], ["demo"], ["run", "list"]], ids=" ".join)
def test_command_refuses_the_address_of_a_gateway(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("BATCHER_PORT", "HTTP_PORT"):
        monkeypatch.setenv(f"TURNSTREAM_{name}", "0")
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", "http://:tml-secret@127.0.0.1:7601")

    error = invoke("", *words).exception

    assert isinstance(error, InvalidConfigError)
    assert str(error) == (
        "TURNSTREAM_REDIS_URL: http://127.0.0.1:7601 is a gateway, and the server needs the store "
        "itself: write redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH"
    )
