"""How the interpreter of a batcher process is set up, looked at in one of its own."""

from __future__ import annotations

import json
import subprocess
import sys

LOOK = """
import gc, json, sys
from turnstream_server.batcher.serving.service import tune_process

usual = [sys.getswitchinterval(), *gc.get_threshold()]
tune_process()
tuned = [sys.getswitchinterval(), *gc.get_threshold()]
print(json.dumps([usual, tuned, gc.get_freeze_count(), len(gc.get_objects())]))
"""


def test_a_batcher_process_stops_its_loop_for_less_than_usual() -> None:
    command = [sys.executable, "-c", LOOK]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    usual, tuned, num_frozen, num_looked_through = json.loads(done.stdout)

    assert tuned[0] < usual[0] / 5
    assert tuned[1] > usual[1]
    assert num_looked_through < num_frozen / 10
