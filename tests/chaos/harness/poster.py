"""A process that posts rewards for trajectories that generators have sealed without one.

It reads the logs of the generators. Some rewards it posts late. Its successor posts all rewards
that this one did not log; its rewards differ, so one of the two may be refused.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from harness.episodes import held_back, reward_by
from harness.history import Logs
from harness.log import ProcessLog, parse_options
from turnstream.errors import TurnstreamError
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream_server.jobs.stack import end_when_stdin_closes

_POLL_S = 0.05
_TIMEOUT_S = 300.0
_SLACK_S = 5.0


def main() -> None:
    end_when_stdin_closes()
    options = parse_options("url", "run", "writer", late_s=0.0, hurries_at=Path)
    folder: Path = options.log.parent
    before = Logs(folder, names="poster-*.jsonl").lines()
    posted = {line["trajectory"] for line in before if line.kind == "posted"}
    logs = Logs(folder, names="generator-*.jsonl")
    awaiting: set[str] = set()
    due: dict[str, float] = {}
    num_read = 0
    with (
        ProcessLog(options.log) as log,
        Publisher(
            options.url, options.run, writer=options.writer, timeout_s=_TIMEOUT_S
        ) as publisher,
    ):
        while True:
            lines = logs.lines()
            for line in lines[num_read:]:
                if line.kind == "sealing" and line.facts.get("awaits"):
                    awaiting.add(line["trajectory"])
                elif line.kind == "sealed" and line["trajectory"] in awaiting - posted:
                    late_s = options.late_s if held_back(line["trajectory"]) else 0.0
                    due.setdefault(line["trajectory"], line.at + late_s)
            num_read = len(lines)
            hurries = options.hurries_at.exists()
            for name in [each for each, at in due.items() if hurries or at <= time.monotonic()]:
                del due[name]
                posted.add(name)
                _post(publisher, log, name, reward_by(options.writer, name))
            threading.Event().wait(_POLL_S)


def _post(publisher: Publisher, log: ProcessLog, name: str, reward: float) -> None:
    log.write("posting", trajectory=name, reward=reward)
    try:
        with log.waiting("post", deadline_s=_TIMEOUT_S + _SLACK_S):
            outcome = publisher.post_reward(keys.parse_trajectory_id(name), reward)
    except TurnstreamError as error:
        log.write("refused", trajectory=name, reward=reward, error=repr(error))
    else:
        log.write("posted", trajectory=name, reward=reward, outcome=outcome.name)


if __name__ == "__main__":
    main()
