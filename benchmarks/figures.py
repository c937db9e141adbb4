"""The tables and sentences of docs/benchmarks.md: one function for each benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

COPY_GOAL = 2.0
STALL_GOAL_MS = 50.0
POINTS_GOAL = 5.0
WEIGHT_GOALS = {1: 64, 8: 16}
IDLE_GOAL_PERCENT = 1.0
FAILOVER_GOAL_S = 10.0
TRAINING_GOAL = 5.0
WAIT_GOAL = 0.05


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; all columns except the first are aligned to the right.

    >>> print(table(["job", "ms"], [["merge", "3"]]))
    | job | ms |
    |---|---:|
    | merge | 3 |
    """
    lines = [titles, *rows]
    ruler = "|---" + "|---:" * (len(titles) - 1) + "|"
    drawn = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([drawn[0], ruler, *drawn[1:]])


def number(value: float | None, digits: int = 1) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def reached(is_reached: bool) -> str:
    """Return the word for a goal."""
    return "reached" if is_reached else "missed"


def ingest(found: dict[str, Any]) -> str:
    """Return the CPU seconds of each way into the store by process."""
    native_s = next(iter(found["ways"].values()))["median_s"]["total"]
    rows: list[list[str]] = []
    for way, each in found["ways"].items():
        median_s, limit_s = each["median_s"], each["limit_s"]
        parts = [number(median_s[name], 2) for name in ("client", "gateway", "store")]
        word = reached(median_s["total"] <= limit_s) if limit_s else ""
        total = [number(median_s["total"], 2), *parts, number(median_s["total"] / native_s)]
        rows.append([way, *total, number(limit_s), word])
    titles = ["", "CPU s", "client", "gateway", "store", "times Redis", "at most", ""]
    return table(titles, rows) + f"\n\n{found['trajectories']:,} trajectories."


def batching(found: dict[str, Any]) -> str:
    """Every job with a goal, the others, growth; and where a goal is missed, what the limit is."""
    lines: list[dict[str, Any]] = found["lines"]
    aimed = [line for line in lines if line["goal"] is not None]
    titles = ["job", "loop ms", "ours ms", "times", "goal", "copy ms", "x copy", "limit ms"]
    rows = [
        [
            _job(line["job"]),
            number(line["loop_ms"]),
            number(line["ours_ms"]),
            number(line["gain"]),
            number(line["goal"], 0),
            number(line["copy_ms"]),
            number(line["over_copy"]),
            number(line["limit_ms"]),
        ]
        for line in lines
    ]
    parts = [table(titles, rows), _missed(aimed), _copied(aimed), _growth(found["growth"])]
    return "\n\n".join(part for part in parts if part)


def _job(name: str) -> str:
    """Return the name; an indented one continues the line above."""
    return f"… {name.strip()}" if name.startswith(" ") else name


def _missed(aimed: list[dict[str, Any]]) -> str:
    missed = [line for line in aimed if line["gain"] < line["goal"]]
    said = [
        f"- {line['job']}: {line['gain']:.1f} of {line['goal']:.0f} times; "
        f"numpy's calls alone would be {line['loop_ms'] / line['limit_ms']:.1f} times"
        for line in missed
    ]
    begin = f"{len(aimed) - len(missed)} of {len(aimed)} jobs reach their goal against the loop"
    return f"{begin}; missed:\n\n" + "\n".join(said) if said else f"{begin}."


def _copied(aimed: list[dict[str, Any]]) -> str:
    above = [line for line in aimed if line["over_copy"] > COPY_GOAL]
    said = [
        f"- {line['job']}: {line['over_copy']:.1f} times the copy of {line['num_bytes'] / 1e6:.0f} "
        f"MB; numpy's calls alone {line['limit_over_copy']:.1f} times"
        for line in above
    ]
    begin = f"{len(aimed) - len(above)} of {len(aimed)} are within {COPY_GOAL:g} times the copy"
    return f"{begin}; above:\n\n" + "\n".join(said) if said else f"{begin}."


def _growth(growth: list[dict[str, Any]]) -> str:
    rows = [
        [
            _job(each["job"]),
            ", ".join(f"{count}: {ns:.2f}" for count, ns in each["ns_per_token"].items()),
            f"{each['ratio']:.2f}",
        ]
        for each in growth
    ]
    return table(["as the work grows", "CPU ns per token, by turns or rows", "last / first"], rows)


def durability(found: dict[str, Any]) -> str:
    """Return the cost of the append-only file, and the number of turns that reach the disk."""
    every, sync = found["everysec"], found["fsync"]
    delayed = "; 1 ms is added to each" if sync["is_delayed"] else ""
    rows = [
        [
            "`everysec`: share of the throughput, publishers",
            f"{100 * every['publisher']:.1f} %",
            "",
        ],
        ["`everysec`: share of the throughput, bare writes", f"{100 * every['bare']:.1f} %", ""],
        [
            "difference, points",
            number(every["points"]),
            f"at most {POINTS_GOAL:g}: {reached(every['points'] <= POINTS_GOAL)}",
        ],
        [
            f"`fsync`: turns/s of {sync['publishers']} publishers",
            number(sync["turns_per_s"], 0),
            "",
        ],
        ["`fsync`: turns/s, one connection, one by one", number(sync["naive_per_s"], 0), ""],
        [
            "ratio",
            number(sync["ratio"]),
            f"{sync['goal']}: {reached(sync['ratio'] >= sync['goal'])}",
        ],
    ]
    pairs = {
        name: ", ".join(f"{100 * share:.0f}" for share in shares)
        for name, shares in every["pairs"].items()
    }
    said = (
        f"The pairs of runs, in %: publishers {pairs['publisher']}; bare writes {pairs['bare']}.\n"
        f"A sync takes {sync['sync_ms']:.2f} ms{delayed}."
    )
    return table(["", "measured", "goal"], rows) + f"\n\n{said}"


def stall(rounds: list[dict[str, Any]]) -> str:
    """The longest stalls of all rounds, and their own CPU time."""
    rows = [
        [
            name.replace("_", " "),
            *[
                number(measure(each[f"{name}_{unit}"] for each in rounds))
                for unit in ("ms", "own_ms")
                for measure in (statistics.median, max)
            ],
        ]
        for name in ("idle", "batcher", "on_loop")
    ]
    median = statistics.median(each["batcher_ms"] for each in rounds)
    worst = max(each["batcher_own_ms"] for each in rounds)
    size = f"{rounds[0]['num_bytes'] / 1e6:.0f} MB"
    goal = f"Goal: the batcher below {STALL_GOAL_MS:g} ms with {size}"
    kept = [f"the median {reached(median < STALL_GOAL_MS)}"]
    kept += [f"the worst by its own CPU time {reached(worst < STALL_GOAL_MS)}"]
    titles = ["longest stall, ms", "median", "worst", "own CPU, median", "own CPU, worst"]
    return table(titles, rows) + f"\n\n{goal}: {', '.join(kept)}."


def ledger(weights: list[dict[str, Any]]) -> str:
    """Return the bytes of a finished trajectory in the store."""
    rows = [
        [
            each["end"],
            str(each["group_size"]),
            f"{each['trajectories']:,}",
            number(each["memory_usage"], 2),
            number(each["used_memory"], 2),
            str(goal := WEIGHT_GOALS[each["group_size"]]),
            reached(max(each["used_memory"], each["memory_usage"]) <= goal),
        ]
        for each in weights
    ]
    titles = ["end", "groups of", "trajectories", "MEMORY USAGE, bytes each", "used_memory, both"]
    return table([*titles, "at most", ""], rows)


def idle(costs: list[dict[str, Any]]) -> str:
    """Return the cost of idle runs for both processes, and of processes without a run."""
    rows = [
        [
            f"{each['num_runs']} {each['kind']}" if each["num_runs"] else "no run",
            number(each["batcher_cpu_s"], 2),
            number(each["store_cpu_s"], 2),
            f"{each['core_percent']:.2f} %",
            number(each["commands"] / each["window_s"]),
        ]
        for each in costs
    ]
    alone = sum(each["core_percent"] for each in costs if not each["num_runs"])
    most = max(each["core_percent"] - alone for each in costs)
    titles = ["runs", "batcher, CPU s", "store, CPU s", "of a core", "commands/s"]
    said = (
        f"In {costs[0]['window_s']:.0f} s. The runs add {most:.2f} % of a core at most; goal "
        f"{IDLE_GOAL_PERCENT:g} %: {reached(most <= IDLE_GOAL_PERCENT)}."
    )
    return table(titles, rows) + f"\n\n{said}"


def release(rounds: list[dict[str, Any]]) -> str:
    """Whether the payload of trained steps goes as fast as new payload comes."""
    rows = [
        [
            f"{each['max_bytes'] / 1e6:.0f} MB" if each["max_bytes"] else "none",
            number(each["per_s"], 0),
            number(each["peak_lag"], 0),
            number(each["peak_held"] / 1e6),
            number(each["end"]["held"] / max(1, each["end"]["retained"])),
            number(each["peak_used_memory"] / 1e6),
            number(each["drained_s"]),
            number(each["cpu_s"]["batcher"]),
        ]
        for each in rounds
    ]
    titles = ["byte budget", "trajectories/s", "steps behind, most", "MB held, most"]
    titles += ["held / retained", "MB used, most", "drained after, s", "batcher, CPU s"]
    ratio = rounds[-1]["per_s"] / rounds[0]["per_s"]
    said = f"Throughput with the budget over without: {ratio:.2f}, in {rounds[0]['wall_s']:.0f} s."
    return table(titles, rows) + f"\n\n{said}"


def failover(found: dict[str, Any]) -> str:
    """Seconds until a step arrives from the other replica."""
    titles = ["trials", "least, s", "median, s", "most, s", f"none in {found['limit_s']:.0f} s"]
    seconds = [number(found[name], 1) for name in ("min_s", "median_s", "max_s")]
    kept = reached(found["max_s"] <= FAILOVER_GOAL_S)
    rows = [[str(found["trials"]), *seconds, str(found["num_at_limit"])]]
    return table(titles, rows) + f"\n\nGoal: at most {FAILOVER_GOAL_S:g} s: {kept}."


def shares(lines: list[dict[str, Any]]) -> str:
    """Return the cost of the shares of all ranks, as multiples of one cut."""
    rows = [
        [
            str(each["num_ranks"]),
            number(each["cut_ms"]),
            number(each["shares_ms"]),
            number(each["shares_per_cut"]),
            number(each["each_cuts_per_cut"]),
        ]
        for each in lines
    ]
    titles = ["ranks", "one cut, ms", "all shares, ms", "times one cut", "each rank cuts, times"]
    return table(titles, rows) + f"\n\n{lines[0]['num_rows']:,} rows."


def training(found: dict[str, Any]) -> str:
    """Return the trained tokens per CPU second of each layout, and the gain over the first."""
    first, last = found["layouts"][0], found["layouts"][-1]
    rows = [
        [
            each["layout"],
            f"{each['num_rows']:,}",
            f"{each['num_tokens']:,}",
            f"{each['padding_share']:.1%}",
            number(each["tokens_per_s"], 0),
            number(each["tokens_per_s"] / first["tokens_per_s"]),
        ]
        for each in found["layouts"]
    ]
    titles = ["layout", "rows", "tokens", "padding", "trained tokens/CPU s", "times"]
    gain = last["tokens_per_s"] / first["tokens_per_s"]
    waiting = found["waiting"]
    return table(titles, rows) + (
        f"\n\nTrajectories: {found['source']}. {last['layout']}: {gain:.1f} times, of "
        f"{TRAINING_GOAL:g}: {reached(gain >= TRAINING_GOAL)}. A worker waited for data "
        f"{waiting['share']:.2%} of {waiting['elapsed_s']:.1f} s, of at most {WAIT_GOAL:.0%}: "
        f"{reached(waiting['share'] < WAIT_GOAL)}."
    )


def sampling(found: dict[str, Any]) -> str:
    """Return the tokens per CPU second of every way to sample."""
    ways = found["ways"]
    rows = [
        [name, number(speed, 0), number(ways["continuous"] / speed)] for name, speed in ways.items()
    ]
    size = f"{found['parameters'] / 1e6:.1f} million parameters"
    said = f"{found['num_requests']} requests, {found['num_tokens']:,} tokens, {size}."
    return table(["way", "tokens/CPU s", "continuous is, times"], rows) + f"\n\n{said}"


def tinker_api(found: dict[str, Any]) -> str:
    """Return the cost of serving a training call, and the memory of the processes under load."""
    models, load = found["models"], found["load"]
    columns = [*next(iter(models.values()))["median_ms"]]
    calls: list[list[str]] = []
    for model, each in models.items():
        values, most = each["median_ms"], each["limit_ms"]
        word = reached(values["overhead"] <= most)
        calls.append([model, *map(number, values.values()), number(most), word])
    used = [[model, *map(number, each["cpu_ms"].values())] for model, each in models.items()]
    processes = [*next(iter(models.values()))["cpu_ms"]]
    parts = [[name, number(ms, 2)] for name, ms in found["parts_ms"].items()]
    memory = [
        [stage, *(number(mb, 0) for mb in each.values())]
        for stage, each in load["memory_mb"].items()
    ]
    tables = [
        table(["median ms", *columns, "at most", ""], calls),
        table(["CPU ms of a call", *processes], used),
        table(["part on its own", "ms"], parts),
        table(["memory, MB", *load["memory_mb"]["before"]], memory),
    ]
    return "\n\n".join([*tables, found["load"]["summary"]])
