"""A process that knows rewards: posts them for what generators have sealed without one.

It learns of a trajectory from the log of its generator, a moment after the seal. Some rewards it
holds back for long. Another that begins in its place posts whatever this one was not told of; since
it thinks otherwise of a trajectory, one of the two may be refused.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

from harness.episodes import held_back, reward_by
from harness.history import Line, Logs
from harness.log import ProcessLog, parse_options
from turnstream.errors import TurnstreamError
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream_server.jobs.stack import end_when_stdin_closes

_POLL_S = 0.05
_TIMEOUT_S = 300.0
_SLACK_S = 5.0


def main() -> None:
    """Post until the process is killed."""
    end_when_stdin_closes()
    options = parse_options("url", "run", "writer", late_s=0.0, hurries_at=Path)
    with (
        ProcessLog(options.log) as log,
        Publisher(
            options.url, options.run, writer=options.writer, timeout_s=_TIMEOUT_S
        ) as publisher,
    ):
        poster = _Poster(publisher, log, options)
        while True:
            poster.look()
            poster.post_due()
            threading.Event().wait(_POLL_S)


class _Poster:
    def __init__(self, publisher: Publisher, log: ProcessLog, options: argparse.Namespace) -> None:
        self._publisher = publisher
        self._log = log
        self._options = options
        folder: Path = options.log.parent
        self._logs = Logs(folder, names="generator-*.jsonl")
        self._num_read = 0
        before = Logs(folder, names="poster-*.jsonl").lines()
        self._posted = {line["trajectory"] for line in before if line.kind == "posted"}
        self._awaiting: set[str] = set()
        self._due: dict[str, float] = {}

    def look(self) -> None:
        """Learn what was sealed since."""
        lines = self._logs.lines()
        for line in lines[self._num_read :]:
            self._learn(line)
        self._num_read = len(lines)

    def _learn(self, line: Line) -> None:
        if line.kind == "sealing" and line.facts.get("awaits"):
            self._awaiting.add(line["trajectory"])
        elif line.kind == "sealed":
            name = line["trajectory"]
            if name in self._awaiting and name not in self._posted:
                late_s = self._options.late_s if held_back(name) else 0.0
                self._due.setdefault(name, line.at + late_s)

    def post_due(self) -> None:
        """Post what is held back no longer; at the end nothing is."""
        hurries = self._options.hurries_at.exists()
        now_s = time.monotonic()
        for name in [name for name, due_s in self._due.items() if hurries or due_s <= now_s]:
            del self._due[name]
            self._posted.add(name)
            self._post(name)

    def _post(self, name: str) -> None:
        reward = reward_by(self._options.writer, name)
        self._log.write("posting", trajectory=name, reward=reward)
        try:
            with self._log.waiting("post", deadline_s=_TIMEOUT_S + _SLACK_S):
                outcome = self._publisher.post_reward(keys.parse_trajectory_id(name), reward)
        except TurnstreamError as error:
            self._log.write("refused", trajectory=name, reward=reward, error=repr(error))
        else:
            self._log.write("posted", trajectory=name, reward=reward, outcome=outcome.name)


if __name__ == "__main__":
    main()
