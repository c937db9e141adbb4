from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import wait_until
from turnstream_server.launch.stack import (
    ServiceFailedError,
    Stack,
    terminate_as_interrupt,
    uninterrupted,
)

GOES_ON = """
from turnstream_server.launch.stack import end_when_stdin_closes
end_when_stdin_closes()
print("started", flush=True)
import threading
threading.Event().wait()
"""

DEAF = """
import signal, threading
from turnstream_server.launch.stack import end_when_stdin_closes
signal.signal(signal.SIGTERM, signal.SIG_IGN)
end_when_stdin_closes()
print("started", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path) as stack:
        yield stack


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def is_alive(pid: int) -> bool:
    """Whether a process of somebody else runs; one that only waits to be reaped does not."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, check=False)
    return shown.stdout.strip()[:1] not in (b"", b"Z")


@pytest.mark.parametrize(
    ("end", "named"),
    [
        ("raise SystemExit('no more disk')", "loser ended with status 1"),
        ("import os; print('no more disk', flush=True); os.kill(os.getpid(), 9)", "signal 9"),
    ],
)
def test_failed_service_is_named_with_the_end_of_its_log(
    stack: Stack, end: str, named: str
) -> None:
    service = stack.start_program("loser", python(end))

    with pytest.raises(ServiceFailedError, match=named) as caught:
        stack.wait_for_all([service], timeout_s=60)

    assert str(caught.value).endswith("\n  no more disk")


def test_waiting_for_one_service_has_a_deadline_and_ends_when_another_fails(stack: Stack) -> None:
    patient = stack.start_program("patient", python(GOES_ON))

    with pytest.raises(ServiceFailedError, match="patient was not done after 0 s"):
        stack.wait_for_all([patient], timeout_s=0.2)
    stack.start_program("loser", python("raise SystemExit(3)"))
    with pytest.raises(ServiceFailedError, match="loser ended with status 3"):
        stack.wait_for_all([patient], timeout_s=60)


def test_a_service_that_fails_between_two_looks_at_it_is_an_error(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It ends after the check for failures and before the check for ends.
    service = stack.start_program("loser", python("raise SystemExit(3)"))
    wait_until(lambda: service.status is not None)
    looks, check = itertools.count(), stack.check
    monkeypatch.setattr(stack, "check", lambda: next(looks) and check())

    with pytest.raises(ServiceFailedError, match="loser ended with status 3"):
        stack.wait_for_all([service], timeout_s=60)


def test_service_is_ready_with_its_file_and_failed_if_it_ends_before(
    tmp_path: Path, stack: Stack
) -> None:
    path = tmp_path / "address"
    service = stack.start_program("server", python(f"open({str(path)!r}, 'w').write('h:1')"))
    wait_until(lambda: service.status is not None)

    assert stack.wait_for_file(path, of=service, timeout_s=60) == "h:1"
    other = stack.start_program("other", python("print('nothing to do')"))
    with pytest.raises(ServiceFailedError, match="other ended before it was ready") as caught:
        stack.wait_for_file(tmp_path / "none", of=other, timeout_s=60)
    assert str(caught.value).endswith("\n  nothing to do")


def test_a_service_that_does_not_stop_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstream_server.launch.stack._STOP_S", 0.2)
    with Stack(tmp_path) as stack:
        service = stack.start_program("deaf", python(DEAF))
        wait_until(lambda: "started" in service.log_path.read_text())

    assert service.status == -signal.SIGKILL


@pytest.mark.parametrize("service", [GOES_ON, DEAF])
def test_no_service_survives_the_death_of_its_supervisor(tmp_path: Path, service: str) -> None:
    supervisor = subprocess.Popen(
        python(
            f"""
            import sys, threading
            from pathlib import Path
            from turnstream_server.launch.stack import Stack
            stack = Stack(Path({str(tmp_path)!r}))
            child = stack.start_program("child", [sys.executable, "-c", {service!r}])
            print(child.pid, flush=True)
            threading.Event().wait()
            """
        ),
        stdout=subprocess.PIPE,
    )
    assert supervisor.stdout is not None
    with supervisor.stdout:
        pid = int(supervisor.stdout.readline())
        wait_until(lambda: "started" in (tmp_path / "logs/child.log").read_text())

        supervisor.kill()
        supervisor.wait()

        wait_until(lambda: not is_alive(pid), describe="the end of the service")


def test_service_gets_the_variables_and_the_scratch_folder_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The services of a machine cannot share the address of the metrics.
    monkeypatch.setenv("TURNSTREAM_METRICS_LISTEN", "127.0.0.1:9100")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    names = ("JOB", "OMP_WAIT_POLICY", "TURNSTREAM_REDIS_URL", "TURNSTREAM_METRICS_LISTEN")
    code = f"import os, tempfile as t; print(*map(os.environ.get, {names}), t.gettempdir())"
    with Stack(tmp_path, store_url="redis://h", environment={"JOB": "mine"}) as stack:
        service = stack.start_program("reader", python(code))
        stack.wait_for_all([service], timeout_s=60)

    log = tmp_path / "logs/reader.log"
    assert log.read_text() == f"mine ACTIVE redis://h None {tmp_path / 'tmp'}\n"
    assert service.log_path == log


def test_signals_interrupt_the_work_and_not_its_end() -> None:
    before = signal.getsignal(signal.SIGTERM)
    reached = False

    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        reached = True

    assert reached
    assert signal.getsignal(signal.SIGTERM) == before
