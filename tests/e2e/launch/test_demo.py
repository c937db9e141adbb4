from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING

import pytest

from testkit import wait_until

if TYPE_CHECKING:
    from tests.e2e.conftest import Job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.campaign
def test_a_short_demo_ends_honestly_and_leaves_nothing(job: Job) -> None:
    status, output = job.run(
        *("demo", "--goal", "0.6", "--max-seconds", "40", "--json", str(job.json_path)),
        timeout_s=200,
    )

    assert status in (0, 1), output + job.logs()
    lines = output.splitlines()
    assert re.fullmatch(r"store   redis://127\.0\.0\.1:\d+/0", lines[0])
    assert re.fullmatch(r"run     demo-[\d-]+", lines[1])
    assert lines[2].startswith("reward  1 if the model finds a number from 1 to 15 in 4 guesses")
    assert lines[3].startswith(f"look    turnstream status {lines[1].split()[1]} --watch --redis ")
    assert lines[-1].startswith("next: `turnstream up`")
    summary = json.loads(job.json_path.read_text())
    has_risen = summary["reward_last_tenth"] >= max(0.6, 2 * summary["reward_first_tenth"])
    assert (status == 0) == has_risen
    assert ("\nlearned: mean reward" in output) == has_risen
    assert ("\nnot learned: mean reward" in output) != has_risen
    assert summary["trajectories"] == sum(summary["ledger"].values())
    assert not {"open", "sealed", "planned", "stepped"} & set(summary["ledger"])
    assert summary["steps"] == summary["batches"] > 0
    assert summary["wire_bytes"] < summary["resend_bytes"]
    assert job.processes() == []
    assert job.files_outside() == []


def test_ctrl_c_stops_a_demo_with_all_its_processes(job: Job) -> None:
    """Takes more than 5 s: all services start, two of them with torch."""
    process = job.start("demo", forks=True)
    wait_until((job.folder / "trainer/weights/v0").exists, timeout_s=120, describe="first weights")

    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 130, output
    assert output.endswith("interrupted\n")
    assert "demo, interrupted" in output
    assert re.search(r"ledger: |trajectories", output)
    assert "Traceback" not in output
    assert job.processes() == []
    assert job.files_outside() == []
