"""The seconds until a trainer has its next step after its batcher replica is frozen.

    python benchmarks/failover.py --json results/failover.json
    python benchmarks/failover.py --tiny        # checks that it works

Two replicas serve one store, and one stream waits for the next step. In each trial the replica that
the stream is connected to is stopped (SIGSTOP: its connections stay open, and nothing answers), the
groups of the next step are published, and the time until the step arrives is taken. Then the
replica is continued. A trial in which nothing arrives within `--limit` seconds counts as that long,
and the next one begins with a new stream.

A replica that leads the run is replaced after its lease of 5 s, so that a step that is not planned
yet may take as long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workload import make_groups

SETTLE_S = 1.0


class Pair:
    """A store, and two replicas."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        from turnstream_server.embedded import EmbeddedServer
        from turnstream_server.launch.stack import Stack

        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(EmbeddedServer())
        services = stack.enter_context(Stack(Path(folder), store_url=server.url))
        self.batchers = [services.start_batcher(f"batcher-{index}") for index in range(2)]
        self.url = server.url

    @property
    def target(self) -> str:
        """Address of both replicas, as gRPC takes it."""
        return "ipv4:" + ",".join(batcher.address for batcher in self.batchers)

    def create_run(self, name: str) -> str:
        """Create a run whose batches have one group."""
        from turnstream.batching.config import BatchingConfig
        from turnstream.store.client.connection import connect
        from turnstream.store.run.runs import create_run

        with connect(self.url) as client:
            create_run(client, name, BatchingConfig(batch_groups=1, mini_batch_groups=1))
        return name

    @contextlib.contextmanager
    def freezing_connected(self) -> Iterator[None]:
        """Inside, the replica in use is stopped: it has the most connections."""
        busiest = max(self.batchers, key=lambda each: _num_connections(each.address))
        os.kill(busiest.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(busiest.pid, signal.SIGCONT)


def _num_connections(address: str) -> int:
    """Return the number of established TCP connections to this local address."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    # gRPC connects to IPv4 addresses through IPv6 sockets.
    tables = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return sum(remote.endswith(port) and state == "01" for _, _, remote, state, *_ in rows)


def measure(*, trials: int, limit_s: float) -> list[float]:
    """Return the seconds of every trial."""
    found: list[float] = []
    with contextlib.ExitStack() as stack:
        pair = Pair(stack)
        while len(found) < trials:
            run = pair.create_run(f"run-{len(found)}")
            found += _measure_stream(pair, run, trials=trials - len(found), limit_s=limit_s)
    return found


def _measure_stream(pair: Pair, run: str, *, trials: int, limit_s: float) -> list[float]:
    """Return the seconds of the trials of one stream, up to the first that reaches the limit."""
    from turnstream.errors import UnavailableError
    from turnstream.generator import Publisher
    from turnstream.worker import BatchStream

    found: list[float] = []
    first, *others = make_groups(trials + 1)
    with (
        Publisher(pair.url, run) as publisher,
        BatchStream(pair.target, run, timeout_s=limit_s) as stream,
    ):
        publisher.publish(first).result(60)
        next(stream)
        for group in others:
            stream.stepped()
            time.sleep(SETTLE_S)  # the next Get waits by then
            with pair.freezing_connected():
                began_s = time.monotonic()
                publisher.publish(group)
                with contextlib.suppress(UnavailableError):
                    next(stream)
                found.append(min(limit_s, time.monotonic() - began_s))
            print(f"  trial: {found[-1]:6.2f} s", flush=True)
            if found[-1] >= limit_s:
                break
    return found


def main() -> None:
    """Measure, and print the least, the median and the most."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="one trial, to check that it works")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    trials = 1 if arguments.tiny else arguments.trials
    seconds = measure(trials=trials, limit_s=arguments.limit)
    line: dict[str, Any] = {
        "trials": trials,
        "limit_s": arguments.limit,
        "min_s": min(seconds),
        "median_s": statistics.median(seconds),
        "max_s": max(seconds),
        "num_at_limit": sum(each >= arguments.limit for each in seconds),
        "seconds": seconds,
    }
    print(f"{'trials':>6} {'min s':>7} {'median s':>8} {'max s':>7} {'at limit':>8}")
    print(
        f"{trials:6} {line['min_s']:7.2f} {line['median_s']:8.2f} {line['max_s']:7.2f} "
        f"{line['num_at_limit']:8}"
    )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(line, indent=2))


if __name__ == "__main__":
    main()
