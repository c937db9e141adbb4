"""A process that observes a run beside its trainer, and logs the hashes of what it saw.

Where its stream ends by a typed error it begins again, as it does when it is killed: under the same
name, behind what it has said to have seen.
"""

from __future__ import annotations

import argparse
import threading

from harness.log import ProcessLog, parse_options
from turnstream.errors import TurnstreamError
from turnstream.worker import ObserverStream
from turnstream_server.jobs.stack import end_when_stdin_closes

MAX_PREFETCH_BYTES = 4 << 20
_PAUSE_S = 0.2
_TIMEOUT_S = 60.0
_SLACK_S = 3.0


def main() -> None:
    """Observe until the run ends."""
    end_when_stdin_closes()
    options = parse_options("target", "run", "observer")
    with ProcessLog(options.log) as log:
        while True:
            try:
                _observe(options, log)
                break
            except TurnstreamError as error:
                log.write("refused", error=repr(error))
                threading.Event().wait(_PAUSE_S)


def _observe(options: argparse.Namespace, log: ProcessLog) -> None:
    wait_s = _TIMEOUT_S + _SLACK_S
    with log.waiting("observe", deadline_s=wait_s):
        stream = ObserverStream(
            options.target,
            options.run,
            options.observer,
            timeout_s=_TIMEOUT_S,
            max_prefetch_bytes=MAX_PREFETCH_BYTES,
        )
    with stream:
        log.write("observing", observer=options.observer, missed=len(stream.missed))
        while True:
            with log.waiting("mini_batch", deadline_s=wait_s):
                pulled = next(stream, None)
            if pulled is None:
                log.write("observed_all", observer=options.observer)
                return
            info = pulled.info
            log.write(
                "observed",
                step=info.step,
                mini_batch=info.mini_batch,
                num_mini_batches=info.num_mini_batches,
                manifest=info.manifest_hash,
                content=pulled.content_hash,
            )
            if pulled.is_last:
                log.write("seeing", step=info.step)
                with log.waiting("seen", deadline_s=wait_s):
                    stream.seen()
                log.write("seen", step=info.step)


if __name__ == "__main__":
    main()
