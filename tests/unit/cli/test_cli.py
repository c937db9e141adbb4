from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from testkit.services.forked import popen
from turnstream_server import cli
from turnstream_server.embedded import EmbeddedServer

TOP = (
    *(
        "up",
        "rollout",
        "demo",
        "replay",
        "config",
        "status",
        "why",
        "text",
        "ledger",
        "batch",
        "evals",
    ),
    *("archive", "plot", "run", "dead", "key", "serve"),
)
GROUPS = {
    "run": (
        *("create", "list", "show", "revise", "pause", "resume", "close", "reopen"),
        *("fork", "replan", "delete"),
    ),
    "dead": ("list", "show", "export", "discard"),
    "key": ("create", "list", "revoke"),
    "serve": ("batcher", "trainer", "generator", "replayer"),
}
OPERATIONS = [*TOP, *(f"{group} {name}" for group, names in GROUPS.items() for name in names)]
READS_STORE = [
    *("status", "why", "text", "ledger", "batch", "evals", "archive", "plot"),
    *(name for name in OPERATIONS if name.startswith(("run ", "dead ", "key "))),
]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("TURNSTREAM_REDIS_URL", raising=False)


def serve(*words: str) -> tuple[int, str]:
    """Return the status and the errors of a service."""
    command = [sys.executable, "-m", "turnstream_server.cli", "serve", *words]
    with popen(command, stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.mark.parametrize("command", OPERATIONS)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(cli.app, [*command.split(), "--help"])

    assert result.exit_code == 0
    assert f"Usage: turnstream {command}" in result.output
    assert "--end-with-stdin" not in result.output
    if command in READS_STORE:
        assert "--json" in result.output
        assert "--redis" in result.output


@pytest.mark.parametrize("group", ["", *GROUPS])
def test_help_lists_every_command_on_one_page(group: str) -> None:
    result = CliRunner().invoke(cli.app, [*group.split(), "--help"])

    names = GROUPS[group] if group else TOP
    assert all(f" {command} " in result.output for command in names)
    assert len(result.output.splitlines()) <= 40


def test_config_prints_the_settings_with_the_password_masked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", "redis://me:hush@store:6379/0")
    monkeypatch.setenv("TURNSTREAM_LEASE_S", "7.5")

    result = CliRunner().invoke(cli.app, ["config"])

    assert "TURNSTREAM_REDIS_URL=redis://me:***@store:6379/0\n" in result.output
    assert "TURNSTREAM_LEASE_S=7.5\n" in result.output


ADDRESSES = {
    "localhost:27211": "write redis://localhost:27211",
    "27211": "write redis://HOST:PORT, or http://HOST:PORT for a gateway",
    "http://localhost:27211": "redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH",
    "redis://localhost:seven": "write redis://HOST:PORT, or http://HOST:PORT for a gateway",
}


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ("config", {"LEASE_S": "-1"}, "^error: TURNSTREAM_LEASE_S: "),
        (
            "run list",
            {"REDIS_URL": "me:hush@store:6379"},
            "TURNSTREAM_REDIS_URL: 'store:6379' is not the address of a store: write redis:",
        ),
        ("run list", {"REDIS_URL": "redis://127.0.0.1:1/0"}, "^error: the store at 127.0.0.1:1 "),
        ("replay none.jsonl --tokenizer .", {}, "none.jsonl"),
        *(
            (f"{command} --engine vllm=10.0.0.7", {}, "^error: --engine: 'vllm=10.0.0.7' is not ")
            for command in ("up", "serve gateway")
        ),
        *(
            (f"{command} --redis {address}", {}, f"^error: --redis: .*{re.escape(form)}$")
            for command in ("run list", "serve batcher")
            for address, form in ADDRESSES.items()
        ),
    ],
)
def test_wrong_input_ends_in_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: str,
    variables: dict[str, str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(f"TURNSTREAM_{name}", value)

    if words.startswith("serve "):
        status, errors = serve(*words.split()[1:])
    else:
        monkeypatch.setattr(sys, "argv", ["turnstream", *words.split()])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        status, errors = ended.value.code, capsys.readouterr().err

    assert status == 1
    assert re.search(message, errors)
    assert len(errors.splitlines()) == 1
    assert not [*tmp_path.iterdir()]


def test_a_service_ends_when_its_standard_input_does() -> None:
    command = [sys.executable, "-m", "turnstream_server.cli", "serve", "batcher"]
    process = popen(
        [*command, "--end-with-stdin", "--redis", "redis://127.0.0.1:1/0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None

    process.stdin.close()

    assert process.wait(timeout=60) is not None


def test_wrong_or_taken_port_of_the_batcher_is_one_line() -> None:
    with EmbeddedServer() as server, socket.create_server(("127.0.0.1", 0)) as taken:
        for listen, message in (
            ("7600", "'7600' is not HOST:PORT, such as 127.0.0.1:7600"),
            ("localhost", "'localhost' is not HOST:PORT"),
            (f"127.0.0.1:{taken.getsockname()[1]}", "cannot be used, another program may listen"),
        ):
            status, errors = serve("batcher", "--listen", listen, "--redis", server.url)

            assert status == 1
            (line,) = (line for line in errors.splitlines() if line.startswith("error: "))
            assert line.startswith("error: --listen: ")
            assert message in line
            assert "Traceback" not in errors
