"""The cost of serving a model over the Tinker API, in addition to its passes.

    make bench                              # with the others
    python benchmarks/tinker_api.py --tiny      # checks that it works

A store, a batcher, a gateway, an engine and a sampler run as processes, one torch thread each.

First part: a `forward_backward` of 64 datums of 512 tokens, with importance sampling, in the bytes
of SDK 0.38. One client submits it and polls its result, for two models of different size:

    submitted    until the client has the request id: gateway, and append to the log
    rows read    the worker has its rows: batcher, and transfer
    passes       forward and backward in the worker
    the rest     wake-up of the worker, its calls of the log, the result and the answer to the poll
    direct       the baseline: the same rows by a call of the same engine in a process without a
                 service. Direct and served calls alternate

The overhead of a call is its whole time without the passes. CPU seconds are those of all processes
during the call. Each part is also measured on its own, in this process: code by its CPU time, calls
of the store by their wall time.

Second part: 512 sampling clients of one session keep one sample of 16 tokens each in flight, by the
SDK. At the same time the session sends 208 calls of `forward` with 3.3 MB each. The memory of all
processes is read at five stages: before, at its peak, after the last answer, after a durable
checkpoint that covers the calls, and after the end of the session.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hosting import Client, Hosted, hosted, training_body
from processes import Role, cpu_seconds, serve_role
from tinker_load import close_sessions, measure_load
from tinker_parts import decode_call, measure_parts, rows_of

from turnstream_server.models.byte_model import byte_model_spec

HERE = Path(__file__)
LIMIT_MS, LIMIT_SHARE = 15.0, 0.10
"""The overhead is at most this, or this share of the passes."""

LIMIT_MEMORY = 1.2
"""Memory of the gateway and of the batcher after a load, in multiples of that before."""

RANK = 8
TIMES = re.compile(r"forward_backward (\d+): rows read in ([\d.]+) ms, passes run in ([\d.]+) ms")

FULL: dict[str, Any] = {
    "models": {
        "large": ({"hidden_size": 256, "num_layers": 4}, 5),
        "small": ({"hidden_size": 32, "num_layers": 1}, 25),
    },
    "call": {"num_data": 64, "length": 512},
    "parts": 50,
    "load": {
        "num_samplers": 512,
        "samples_each": 16,
        "num_bodies": 208,
        "num_data": 320,
        "length": 512,
        "settle_s": 15,
    },
}
TINY: dict[str, Any] = {
    "models": {"small": ({"hidden_size": 32, "num_layers": 1}, 1)},
    "call": {"num_data": 2, "length": 16},
    "parts": 1,
    "load": {
        "num_samplers": 4,
        "samples_each": 1,
        "num_bodies": 2,
        "num_data": 2,
        "length": 16,
        "settle_s": 0,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Milliseconds of one served call, and of the direct call before it.

    Attributes:
        served_ms: from the beginning of the submit to the last byte of the result.
        submit_ms, read_ms, passes_ms: see the top of this file.
        cpu_ms: CPU time of each process during the call, and that of the direct call.
        direct_ms: the direct call.
    """

    served_ms: float
    submit_ms: float
    read_ms: float
    passes_ms: float
    cpu_ms: dict[str, float]
    direct_ms: float

    @property
    def rest_ms(self) -> float:
        """Time of the call outside all other parts."""
        return self.served_ms - self.submit_ms - self.read_ms - self.passes_ms

    @property
    def overhead_ms(self) -> float:
        """Time of the call outside its passes."""
        return self.served_ms - self.passes_ms


# ------------------------------------------------------------------------------ the baseline


def start_direct(config: dict[str, Any]) -> Any:
    """Train rows of a body by direct calls of an engine, and return the times of each call."""
    import torch

    from turnstream_server.engine.hosted_base import EngineSettings, HostedBase
    from turnstream_server.operations.models import ModelRecord
    from turnstream_server.trainer.passes import OperationLoss

    torch.set_num_threads(1)
    base = HostedBase("direct", Path(config["base"]), settings=EngineSettings())
    record = ModelRecord(config["model_id"], "direct", owner="", lora_rank=RANK, lora_seed=1)
    engine = base.make(record).engine
    body = training_body(record.model_id, 1, **config["call"])
    mini_batch = rows_of(decode_call(body))
    loss = OperationLoss(name="importance_sampling")

    def work(_: dict[str, Any]) -> dict[str, Any]:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        engine.forward_backward_operations(mini_batch, loss=loss)
        elapsed_s = time.perf_counter() - began_s
        return {"ms": 1e3 * elapsed_s, "cpu_ms": 1e3 * (time.process_time() - cpu_s)}

    return work


# ------------------------------------------------------------------------------ rounds


class Bench:
    """One model that is served, and the same one in a process without a service."""

    def __init__(self, services: Hosted, base_model: str, *, call: dict[str, int]) -> None:
        self._services = services
        self._call = call
        self._client = Client(services.address)
        self._model_id = self._client.create_model(base_model, rank=RANK)
        config = {"base": str(services.bases[base_model]), "model_id": self._model_id, "call": call}
        # As the engine: see jobs/stack.py.
        allocator = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **allocator}
        self._direct = Role(HERE, "direct", {**config, "environment": environment})

    def round(self, number: int) -> Call:
        """Return the times of a direct call and of a served one, the first of this number."""
        self._direct.send({})
        direct = self._direct.receive()
        body = training_body(self._model_id, number, **self._call)
        before = self._cpu_s()
        began_s = time.perf_counter()
        request_id = self._client.train(body)
        submitted_s = time.perf_counter()
        self._client.result(request_id)
        ended_s = time.perf_counter()
        after = self._cpu_s()
        read_ms, passes_ms = self._engine_ms(number)
        return Call(
            served_ms=1e3 * (ended_s - began_s),
            submit_ms=1e3 * (submitted_s - began_s),
            read_ms=read_ms,
            passes_ms=passes_ms,
            cpu_ms={
                **{name: 1e3 * (after[name] - used_s) for name, used_s in before.items()},
                "direct": direct["cpu_ms"],
            },
            direct_ms=direct["ms"],
        )

    def close(self) -> None:
        """Stop the process of direct calls."""
        self._direct.stop()

    def _cpu_s(self) -> dict[str, float]:
        pids = self._services.pids
        return {name: cpu_seconds(pids[name]) for name in ("gateway", "store", "batcher", "engine")}

    def _engine_ms(self, number: int) -> tuple[float, float]:
        """Return the times that the engine has logged for the newest call."""
        found = TIMES.findall(self._services.engine_log.read_text())[-1]
        if int(found[0]) != number:
            raise RuntimeError(f"the engine has logged the times of call {found[0]}, not {number}")
        return float(found[1]), float(found[2])


def measure_calls(
    services: Hosted, base_model: str, *, rounds: int, call: dict[str, int]
) -> dict[str, Any]:
    """Return the rounds of one model and their medians; the first round is not counted."""
    bench = Bench(services, base_model, call=call)
    try:
        calls = [bench.round(number) for number in range(1, rounds + 2)][1:]
    finally:
        bench.close()
    columns = {
        "direct": [each.direct_ms for each in calls],
        "served": [each.served_ms for each in calls],
        "submitted": [each.submit_ms for each in calls],
        "rows read": [each.read_ms for each in calls],
        "passes": [each.passes_ms for each in calls],
        "the rest": [each.rest_ms for each in calls],
        "overhead": [each.overhead_ms for each in calls],
    }
    median_ms = {name: statistics.median(values) for name, values in columns.items()}
    cpu_ms = {
        name: statistics.median(each.cpu_ms[name] for each in calls) for name in calls[0].cpu_ms
    }
    return {
        "median_ms": median_ms,
        "cpu_ms": cpu_ms,
        "limit_ms": max(LIMIT_MS, LIMIT_SHARE * median_ms["passes"]),
        "rounds": [asdict(each) for each in calls],
    }


def measure(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the results of both parts."""
    specs = {name: byte_model_spec(**spec) for name, (spec, _) in sizes["models"].items()}
    specs["tiny"] = replace(byte_model_spec(hidden_size=8, num_layers=1), num_heads=1)
    with hosted(specs) as services:
        models = {
            name: measure_calls(services, name, rounds=rounds, call=sizes["call"])
            for name, (_, rounds) in sizes["models"].items()
        }
        report_calls(models)
        parts = measure_parts(services.store_url, rounds=sizes["parts"], **sizes["call"])
        report_parts(parts)
        close_sessions(services.store_url)
        load = measure_load(services, sizes["load"], base_model="tiny")
        load["summary"] = summary_of(load)
        report_load(load)
    return {"call": sizes["call"], "models": models, "parts_ms": parts, "load": load}


# ------------------------------------------------------------------------------ output


def report_calls(models: dict[str, Any]) -> None:
    """Print the parts of a call, and the CPU time of each process, for each model."""
    for model, found in models.items():
        median_ms = found["median_ms"]
        word = "reached" if median_ms["overhead"] <= found["limit_ms"] else "missed"
        print(f"{model}, ms: {_listed(median_ms)}")
        print(f"{model}, CPU ms: {_listed(found['cpu_ms'])}")
        print(
            f"{model}: overhead at most {found['limit_ms']:.1f} ms: {word}; served is "
            f"{median_ms['served'] / median_ms['direct']:.2f} times direct",
            flush=True,
        )


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in values.items())


def report_parts(parts: dict[str, float]) -> None:
    """Print the parts on their own."""
    for name, value in parts.items():
        print(f"  {name:32} {value:7.2f} ms")
    print(f"  {'all of these':32} {sum(parts.values()):7.2f} ms", flush=True)


def summary_of(load: dict[str, Any]) -> str:
    """Return a paragraph on the answers, the heartbeats, and the memory after the load."""
    before, after = load["memory_mb"]["before"], load["memory_mb"]["session closed"]
    kept = {name: after[name] / before[name] for name in ("gateway", "batcher")}
    word = "reached" if max(kept.values()) <= LIMIT_MEMORY else "missed"
    return (
        f"{load['num_bodies']} calls in {load['bodies_s']:.0f} s, {load['num_samples']:,} samples "
        f"of {load['num_samplers']} samplers in {load['samples_s']:.0f} s (median "
        f"{load['sample_median_s']:.2f} s, longest {load['sample_longest_s']:.2f} s): "
        f"{len(load['failures'])} failures. The newest heartbeat was never older than "
        f"{load['oldest_beat_s']:.1f} s, and the SDK logged {len(load['warnings'])} warnings. The "
        f"gateway answered a call without work in {load['answer_median_ms']:.1f} ms (median), "
        f"{load['answer_longest_ms']:.0f} ms at most. After "
        f"the session the memory of the gateway is {kept['gateway']:.2f} times that of before, and "
        f"of the batcher {kept['batcher']:.2f} times; at most {LIMIT_MEMORY}: {word}."
    )


def report_load(load: dict[str, Any]) -> None:
    """Print the answers, the heartbeats, and the memory at each stage."""
    print(load["summary"])
    for text in [*load["failures"][:5], *load["warnings"][:5]]:
        print(f"  {text}")
    stages = load["memory_mb"]
    print(f"{'MB':16}" + "".join(f"{name:>18}" for name in stages["before"]))
    for stage, found in stages.items():
        print(f"{stage:16}" + "".join(f"{value:18.0f}" for value in found.values()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small calls, to check that it works")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", choices=["direct"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        serve_role(start_direct)
        return
    found = measure(TINY if arguments.tiny else FULL)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
