"""Commands in process groups: their end, and the limit of their output."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from testkit.waiting import wait_until
from turnstream_server.rollout.processes import MAX_OUTPUT_BYTES, Ended, run_process

STUBBORN = "trap '' TERM; sleep 1000 & echo $!; wait"


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("sleep 1000 & echo $!; exit 4", Ended(4)),
        ("sleep 1000 & echo $!; wait", Ended(143, has_timed_out=True)),
        (f'sh -c "{STUBBORN}" & {STUBBORN}', Ended(137, has_timed_out=True)),
        ("sleep 1000 & echo $!; kill -9 $$", Ended(137)),
    ],
)
async def test_no_process_of_a_group_is_left(script: str, expected: Ended, tmp_path: Path):
    output = tmp_path / "output"

    ended = await run_process(
        ["sh", "-c", script], environment=os.environ, output=output, timeout_s=1.0
    )

    assert ended == expected
    pids = [int(line) for line in output.read_text().split()]
    assert pids
    wait_until(lambda: not any(map(is_running, pids)), describe="the end of the group")


async def test_output_is_cut_at_its_limit(tmp_path: Path):
    output, errors = tmp_path / "output", tmp_path / "errors"
    script = f"head -c {2 * MAX_OUTPUT_BYTES} /dev/zero; echo some errors >&2"

    ended = await run_process(
        ["sh", "-c", script], environment=os.environ, output=output, errors=errors, timeout_s=60
    )

    assert ended == Ended(0)
    assert output.stat().st_size < MAX_OUTPUT_BYTES + 100
    assert output.read_bytes().endswith(b"\n[the output is cut here: it has more than 16 MiB]\n")
    assert errors.read_text() == "some errors\n"
