"""The agentic part of the whole-path benchmark: many small turns, appended one by one.

Each trajectory of a group has an asyncio task, which appends its turns and seals it. The figures
are CPU microseconds of each process per turn; opening, sealing, planning and rows are included.

The floor of a stage is measured in the same run, with the same number and size of records:

- producer: XADD by redis-py, one turn of each trajectory of a group in a pipeline;
- store: these XADD, and XRANGE of all streams;
- batcher: XRANGE by redis-py, the rows through a stream of grpcio, and one copy by numpy;
- consumer: the stream of grpcio.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from processes import Role, cpu_of_work
from workload import (
    AGENTIC_TURNS,
    GROUP_SIZE,
    checksum_groups,
    int64_bytes,
    make_agentic_groups,
)

SCRIPT = Path(__file__).with_name("pipeline.py")
PUBLISHERS = (1, 8)


def start_producer(config: dict[str, Any]) -> Any:
    """Append every turn of this process's share of the groups, one group after the other."""
    from turnstream.generator import AsyncPublisher

    groups = make_agentic_groups(config["groups"], first=config["first"])
    expected = asdict(checksum_groups(groups))

    async def write(trajectory: Any, writer: Any) -> None:
        for turn in trajectory.turns:
            await writer.append(
                turn.prompt_ids,
                turn.response_ids,
                logprobs=turn.logprobs,
                loss_mask=turn.loss_mask,
            )
        await writer.seal(trajectory.reward)

    async def publish(run: str) -> int:
        async with AsyncPublisher(config["redis_url"], run) as publisher:
            for group in groups:
                opened = publisher.group(group.group_id, GROUP_SIZE, prompt_uid=group.prompt_uid)
                async with opened as writers:
                    await asyncio.gather(*map(write, group.trajectories, writers))
            await publisher.flush()
            return publisher.statistics().wire_bytes

    def work(message: dict[str, Any]) -> dict[str, Any]:
        wire_bytes = asyncio.run(publish(message["run"]))
        return {"checksum": expected, "wire_bytes": wire_bytes, "is_closed": False}

    return work


class StageFloors:
    """The processes of the floor; a context manager. Its rounds alternate with those measured."""

    def __init__(
        self,
        script: Path,
        redis_url: str,
        server_pid: int,
        *,
        num_publishers: int,
        num_turns: int,
        wire_bytes: int,
        row_bytes: int,
    ) -> None:
        self._script, self._server_pid = script, server_pid
        self._running = ExitStack()
        self._writers = [
            self._start(
                "redis",
                redis_url=redis_url,
                name=f"floor-{number}",
                num_records=num_turns // num_publishers,
                records_per_stream=AGENTIC_TURNS,
                record_bytes=wire_bytes // num_turns,
            )
            for number in range(num_publishers)
        ]
        self._sender = self._start("grpc_server", num_bytes=row_bytes)
        self._sender.send({})
        self._receiver = self._start("grpc_client", port=self._sender.receive()["port"])
        self._copier = self._start("numpy", num_bytes=row_bytes, num_batches=8)

    def _start(self, kind: str, **config: Any) -> Role:
        role = Role(self._script, f"floor_{kind}", config)
        self._running.callback(role.stop)
        return role

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.close()

    def round(self) -> dict[str, float]:
        """Return the CPU seconds of the bare transports by stage, for turns of the same size."""
        pids, store = [role.pid for role in self._writers], [self._server_pid]
        producer_s, written_s = cpu_of_work(self._writers, {"phase": "write"}, pids, store)
        read_s, sent_s = cpu_of_work(self._writers, {"phase": "read"}, pids, store)
        send_s, consumer_s = cpu_of_work(
            [self._receiver], {}, [self._sender.pid], [self._receiver.pid]
        )
        (copy_s,) = cpu_of_work([self._copier], {}, [self._copier.pid])
        return {
            "producer": producer_s,
            "store": written_s + sent_s,
            "batcher": read_s + send_s + copy_s,
            "consumer": consumer_s,
        }


def report(found: dict[str, Any]) -> None:
    """Print one line per stage, for each number of publishers."""
    print(f"agentic: {found['trajectories']} trajectories, {found['turns']} turns")
    for num, each in found["publishers"].items():
        print(f"  {num} publishers: CPU microseconds per turn, and times the floor")
        for stage, turn_us in each["turn_us"].items():
            times = turn_us / each["floor_us"][stage]
            print(f"    {stage:10} {turn_us:8.1f} {times:8.2f} x")
        memory = "  ".join(f"{stage} {mb:.0f}" for stage, mb in each["memory_mb"].items())
        print(f"    peak memory, MB  {sum(each['memory_mb'].values()):.0f}   [{memory}]")


def measure(start_bench: Callable[..., Any], *, num_groups: int, num_rounds: int) -> Any:
    """Return the CPU of a turn by stage, its floor and all memory, by number of publishers.

    `start_bench` makes a `pipeline.Bench`.
    """
    num_rows = num_groups * GROUP_SIZE
    num_turns = num_rows * AGENTIC_TURNS
    row_bytes = int64_bytes(make_agentic_groups(num_groups))
    found: dict[str, Any] = {"trajectories": num_rows, "turns": num_turns, "publishers": {}}
    for num in PUBLISHERS:
        bench = start_bench(num_groups=num_groups, torch_threads=1, num_publishers=num)
        try:
            wire_bytes = bench.round(f"warm-up-{num}").wire_bytes
            with StageFloors(
                SCRIPT,
                bench.server.url,
                bench.server.pid,
                num_publishers=num,
                num_turns=num_turns,
                wire_bytes=wire_bytes,
                row_bytes=row_bytes,
            ) as floors:
                both = [(bench.round(f"{num}-{i}"), floors.round()) for i in range(num_rounds)]
            memory_mb = bench.peak_memory_mb()
        finally:
            bench.close()
        found["publishers"][str(num)] = {
            "turn_us": _turn_us([each.cpu_s for each, _ in both], num_turns=num_turns),
            "floor_us": _turn_us([floor_s for _, floor_s in both], num_turns=num_turns),
            "memory_mb": memory_mb,
            "rounds": [asdict(each) for each, _ in both],
        }
    return found


def _turn_us(rounds: list[dict[str, float]], *, num_turns: int) -> dict[str, float]:
    return {
        stage: statistics.median(each[stage] for each in rounds) / num_turns * 1e6
        for stage in rounds[0]
    }
