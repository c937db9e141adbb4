"""A rank of the trainer that kills itself where the variable KILLS says; else `turnstream`.

KILLS is a JSON list with one entry for each start by torchrun, `[rank, place]`. A place is that of
a failpoint, or `after STEP DELAY SIGNAL`: so many seconds after the metrics of a step are written.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.002


def doom(environment: dict[str, str], *, start: int, rank: int) -> None:
    """Arm the place of this start, if it is one of this rank."""
    kills: list[Any] = json.loads(environment["KILLS"])
    if start >= len(kills) or kills[start][0] != rank:
        return
    place: str = kills[start][1]
    if not place.startswith("after "):
        os.environ["TURNSTREAM_FAILPOINT"] = place
        return
    _, step, delay_s, name = place.split()
    metrics = Path(environment["FOLDER"]) / "metrics.jsonl"
    arguments = (metrics, int(step), float(delay_s), signal.Signals[name])
    threading.Thread(target=_kill_after, args=arguments, daemon=True).start()


def _main() -> None:
    from turnstream_server.__main__ import main  # it handles Ctrl-C, which is not for the tests

    main()


def note_start(folder: Path, *, rank: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        with (folder / "starts").open("a") as starts:
            starts.write("start\n")


def _kill_after(metrics: Path, step: int, delay_s: float, number: signal.Signals) -> None:
    while last_step(metrics) < step:
        time.sleep(_POLL_S)
    time.sleep(delay_s)
    os.kill(os.getpid(), number)


def last_step(metrics: Path) -> int:
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


if __name__ == "__main__":
    number, own_rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    note_start(Path(os.environ["FOLDER"]), rank=own_rank)
    doom(dict(os.environ), start=number, rank=own_rank)
    _main()
