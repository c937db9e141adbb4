"""Whether the release of trained steps keeps up with planning, without and with a byte budget.

    python benchmarks/release.py                  # two runs of 30 s
    python benchmarks/release.py --tiny           # two runs of 2 s
    python benchmarks/release.py --seconds 60 --filtered 0.3

Publishers stream groups of eight small trajectories (one turn, 100 prompt and 50 response tokens)
at a target rate. A trainer pulls, steps and commits every batch at once. The store, the batcher,
the publishers and the trainer are processes of their own.

The steps that a checkpoint retains must stay in the store. The columns of the table:

    lag        steps whose payload may be deleted and is still there.
    held       bytes by the count of the run, with those that open trajectories reserve.
    retained   bytes of the planned steps that must be kept.
    used       bytes by the count of the store.
    drained    seconds from the end of the stream until no payload that may be deleted is left.
    batcher    CPU seconds of its process; the same for the store.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from processes import Role, cpu_seconds, serve_role

HERE = Path(__file__)
GROUP_SIZE = 8
BATCH_GROUPS = 16
RETAIN_CHECKPOINTS = 2
PROMPT_TOKENS, RESPONSE_TOKENS = 100, 50
MAX_STALENESS = 8
UNACKNOWLEDGED_GROUPS = 64
PERIOD_S = 0.5
LAST_S = 120.0
BUDGET_BYTES = 200_000_000
FULL = {"seconds": 30.0, "rate": 2_000.0, "publishers": 2}
TINY = {"seconds": 2.0, "rate": 200.0, "publishers": 1}


# ------------------------------------------------------------------------------ roles


def start_publisher(config: dict[str, Any]) -> Any:
    """Publish groups at a rate for some seconds, then close the run."""
    from turnstream.generator import Publisher

    every = round(1 / config["filtered"]) if config["filtered"] else 0

    def work(message: dict[str, Any]) -> dict[str, Any]:
        period_s = GROUP_SIZE / message["rate"]
        with Publisher(config["redis_url"], message["run"], keep_s=0) as publisher:
            waiting: deque[Any] = deque()
            start_s, number = time.monotonic(), 0
            for number in itertools.count():
                if (now_s := time.monotonic() - start_s) >= message["seconds"]:
                    break
                time.sleep(max(0.0, number * period_s - now_s))
                is_filtered = every > 0 and number % every == 0
                name = f"{config['name']}-{number}"
                waiting.append(publisher.publish(_group(name, is_filtered=is_filtered)))
                if len(waiting) > UNACKNOWLEDGED_GROUPS:
                    waiting.popleft().result(LAST_S)
        return {"groups": number}

    return work


def _group(name: str, *, is_filtered: bool) -> Any:
    """Return a group of small trajectories; one whose rewards are equal is not trained."""
    import numpy as np

    from turnstream.types import Group, Trajectory, Turn

    turn = Turn(
        prompt_ids=np.arange(PROMPT_TOKENS, dtype=np.int32),
        response_ids=np.arange(RESPONSE_TOKENS, dtype=np.int32),
        logprobs=np.full(RESPONSE_TOKENS, -0.5, np.float32),
    )
    return Group(
        group_id=name,
        prompt_uid=name,
        trajectories=[
            Trajectory(turns=[turn], sample=sample, reward=0.0 if is_filtered else float(sample))
            for sample in range(GROUP_SIZE)
        ],
    )


def start_trainer(config: dict[str, Any]) -> Any:
    """Pull, step and commit every batch until the run ends."""
    from turnstream.worker import BatchStream

    def work(message: dict[str, Any]) -> dict[str, Any]:
        num_steps = 0
        with BatchStream(config["batcher"], message["run"]) as stream:
            for mini_batch in stream:
                if mini_batch.is_last:
                    stream.committed(stream.stepped())
                    num_steps += 1
        return {"steps": num_steps}

    return work


ROLES = {"publisher": start_publisher, "trainer": start_trainer}


# ------------------------------------------------------------------------------ samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The state of a run at one time.

    Attributes:
        at_s: seconds since the publishers began.
        lag: steps whose payload may be deleted and is still there.
        unfolded: steps that may leave the ledger and are still in it.
        held: bytes by the count of the run, reservations included.
        retained: bytes of the planned steps that must be kept.
        used_memory: bytes by the count of the store.
        ledger: entries in the ledger.
    """

    at_s: float
    committed: int
    lag: float
    unfolded: int
    held: int
    retained: int
    used_memory: int
    ledger: int


def read_sample(client: Any, run: str, *, start_s: float) -> Sample:
    """Return the state of a run now. All trajectories have one size, so bytes count steps."""
    from turnstream.store.client import keys

    names = keys.run_keys(run)
    pipeline = client.pipeline(transaction=True)
    pipeline.hmget(names.frontier, "planned", "committed", "folded")
    pipeline.hmget(names.budget, "reserved", "stored", "planned", "estimate")
    pipeline.hlen(names.ledger)
    pipeline.info("memory")
    frontier, budget, ledger, memory = pipeline.execute()
    planned, committed, folded = [int(each or 0) for each in frontier]
    reserved, stored, in_plans, estimate = [int(each or 0) for each in budget]
    may_go = max(0, committed - RETAIN_CHECKPOINTS + 1)
    retained = (planned - may_go) * BATCH_GROUPS * GROUP_SIZE * estimate
    return Sample(
        at_s=time.monotonic() - start_s,
        committed=committed,
        lag=max(0, in_plans - retained) / max(1, BATCH_GROUPS * GROUP_SIZE * estimate),
        unfolded=may_go - folded,
        held=reserved + stored + in_plans,
        retained=retained,
        used_memory=int(memory["used_memory"]),
        ledger=ledger,
    )


# ------------------------------------------------------------------------------ rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One run of the workload.

    Attributes:
        per_s: trajectories that were sealed and decided per second while the publishers ran.
        end: the last sample while the publishers ran.
        drained_s: seconds from then until nothing that may be deleted was left.
        cpu_s: by process, until then.
    """

    max_bytes: int
    per_s: float
    wall_s: float
    peak_lag: float
    peak_unfolded: int
    peak_held: int
    peak_used_memory: int
    end: Sample
    drained_s: float
    cpu_s: dict[str, float]
    samples: list[Sample]


class Bench:
    """The processes, used for every round."""

    def __init__(self, *, num_publishers: int, filtered: float) -> None:
        from turnstream_server.embedded import EmbeddedServer
        from turnstream_server.launch.stack import Stack

        self.folder = tempfile.TemporaryDirectory()
        self.server = EmbeddedServer()
        self.server.start()
        self.stack = Stack(Path(self.folder.name), store_url=self.server.url)
        self.batcher = self.stack.start_batcher()
        common = {"redis_url": self.server.url, "filtered": filtered}
        self.publishers = [
            Role(HERE, "publisher", common | {"name": f"p{number}"})
            for number in range(num_publishers)
        ]
        self.trainer = Role(HERE, "trainer", {"batcher": self.batcher.address})

    def round(self, run: str, *, rate: float, seconds: float, max_bytes: int) -> Round:
        """Stream for some seconds, then wait until all is released that may be."""
        from turnstream.store.client.connection import connect

        with connect(self.server.url) as client:
            self._create_run(client, run, max_bytes=max_bytes)
            pids = {"store": self.server.pid, "batcher": self.batcher.pid}
            pids |= {each.name: each.pid for each in (*self.publishers, self.trainer)}
            before = {name: cpu_seconds(pid) for name, pid in pids.items()}
            start_s = time.monotonic()
            self.trainer.send({"run": run})
            for each in self.publishers:
                each.send({"run": run, "seconds": seconds, "rate": rate / len(self.publishers)})
            samples: list[Sample] = []
            while time.monotonic() - start_s < seconds:
                time.sleep(PERIOD_S)
                samples.append(read_sample(client, run, start_s=start_s))
            end, num_decided = samples[-1], _num_decided(client, run)
            groups = sum(each.receive()["groups"] for each in self.publishers)
            self._close_run(client, run)
            self.trainer.receive()
            while samples[-1].lag > 0 and samples[-1].at_s - end.at_s < LAST_S:
                time.sleep(PERIOD_S)
                samples.append(read_sample(client, run, start_s=start_s))
            print(f"  {run}: {groups * GROUP_SIZE} trajectories", file=sys.stderr)
        return Round(
            max_bytes=max_bytes,
            per_s=num_decided / end.at_s,
            wall_s=end.at_s,
            peak_lag=max(each.lag for each in samples),
            peak_unfolded=max(each.unfolded for each in samples),
            peak_held=max(each.held for each in samples),
            peak_used_memory=max(each.used_memory for each in samples),
            end=end,
            drained_s=samples[-1].at_s - end.at_s,
            cpu_s={name: cpu_seconds(pid) - before[name] for name, pid in pids.items()},
            samples=samples,
        )

    def _create_run(self, client: Any, run: str, *, max_bytes: int) -> None:
        from turnstream.batching.config import BatchingConfig, GroupFilter
        from turnstream.store.run.runs import create_run

        config = BatchingConfig(
            batch_groups=BATCH_GROUPS,
            mini_batch_groups=BATCH_GROUPS,
            max_staleness=MAX_STALENESS,
            retain_checkpoints=RETAIN_CHECKPOINTS,
            group_filters=(GroupFilter(kind="zero_variance"),),
            max_bytes=max_bytes,
        )
        create_run(client, run, config)

    def _close_run(self, client: Any, run: str) -> None:
        from turnstream.store.run.runs import close_run

        close_run(client, run, "all groups published")

    def close(self) -> None:
        """Stop every process."""
        for each in (*self.publishers, self.trainer):
            each.stop()
        self.stack.stop()
        self.server.stop()
        self.folder.cleanup()


def _num_decided(client: Any, run: str) -> int:
    """Return the trajectories of a run that are planned or ended untrained."""
    from turnstream.store.client import keys

    counts = client.hmget(keys.run_keys(run).counts, "planned", "filtered")
    return sum(int(each or 0) for each in counts)


# ------------------------------------------------------------------------------ report


def report(rounds: list[Round]) -> None:
    """Print one line per round, and the throughput with the budget over the one without."""
    print(
        f"{'max_bytes':>12} {'per s':>7} {'lag peak':>9} {'end':>7} {'MB held peak':>13} "
        f"{'end':>6} {'held/retained':>14} {'MB used peak':>13} {'end':>6} {'drained s':>10} "
        f"{'batcher':>8} {'store':>6}"
    )
    for each in rounds:
        ratio = each.end.held / max(1, each.end.retained)
        print(
            f"{each.max_bytes:12,} {each.per_s:7.0f} {each.peak_lag:9.1f} {each.end.lag:7.1f} "
            f"{each.peak_held / 1e6:13.1f} {each.end.held / 1e6:6.1f} {ratio:14.1f} "
            f"{each.peak_used_memory / 1e6:13.1f} {each.end.used_memory / 1e6:6.1f} "
            f"{each.drained_s:10.1f} {each.cpu_s['batcher']:8.2f} {each.cpu_s['store']:6.2f}"
        )
    if len(rounds) > 1:
        print(f"with the budget over without: {rounds[1].per_s / rounds[0].per_s:.2f} x")


def main() -> None:
    """Measure without and with a budget, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=sorted(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rate", type=float, help="trajectories per second")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--publishers", type=int)
    parser.add_argument("--filtered", type=float, default=0.0, help="share that is not trained")
    parser.add_argument("--max-bytes", type=int, default=BUDGET_BYTES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.role:
        serve_role(ROLES[arguments.role])
        return
    sizes = TINY if arguments.tiny else FULL
    rate, seconds = arguments.rate or sizes["rate"], arguments.seconds or sizes["seconds"]
    num_publishers = arguments.publishers or int(sizes["publishers"])
    rounds: list[Round] = []
    for max_bytes in (0, arguments.max_bytes):
        bench = Bench(num_publishers=num_publishers, filtered=arguments.filtered)
        try:
            bench.round("warm-up", rate=rate / 4, seconds=1.0, max_bytes=0)
            rounds.append(bench.round("run", rate=rate, seconds=seconds, max_bytes=max_bytes))
        finally:
            bench.close()
    print(f"{rate:.0f} trajectories per second for {seconds:.0f} s, retain_checkpoints=2\n")
    report(rounds)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(each) for each in rounds], indent=2))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
