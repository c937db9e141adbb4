"""The tables of the whole path, its peers and cold starts in docs/benchmarks.md."""

from __future__ import annotations

import statistics
from typing import Any

from figures import number, reached, table


def pipeline(found: dict[str, Any]) -> str:
    """Return the CPU seconds of the whole path by process, and of the floor."""
    floor_s = sum(found["floor_s"].values())
    titles = [name for name, value in found.items() if isinstance(value, dict) and "cpu_s" in value]
    stages = [*found[titles[0]]["rounds"][0]["cpu_s"]]
    rows = [
        [
            title,
            number(found[title]["cpu_s"], 2),
            *[
                number(
                    statistics.median(each["cpu_s"][stage] for each in found[title]["rounds"]), 2
                )
                for stage in stages
            ],
            f"{found[title]['cpu_s'] / floor_s:.2f}",
            f"{found['trajectories'] / found[title]['wall_s']:.0f}",
        ]
        for title in titles
    ]
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in found["floor_s"].items())
    size = f"{found['trajectories']} trajectories, {found['int64_bytes'] / 1e6:.1f} MB"
    return "\n\n".join(
        [
            table(["", "CPU s", *stages, "times the floor", "trajectories/s"], rows),
            f"{size}; the floor takes {floor_s:.3f} CPU s ({parts}).",
            *([] if "growth" not in found else [_growth(found["growth"])]),
            *([] if "agentic" not in found else _agentic(found["agentic"])),
        ]
    )


def _growth(found: dict[str, Any]) -> str:
    """Return how many times the CPU seconds more work takes."""
    times, goal = found["grown_s"] / found["once_s"], found["goal"]
    return (
        f"{found['growth']} times the work takes {times:.2f} times the CPU s, of at most {goal}: "
        f"{reached(times <= goal)}."
    )


def _agentic(found: dict[str, Any]) -> list[str]:
    """Return the CPU of a turn by process and number of publishers, and its floor."""
    runs = found["publishers"]
    stages = [*next(iter(runs.values()))["turn_us"]]
    titles = ["µs per turn", *(f"{name}, times the floor" for name in stages), "all memory, MB"]
    rows = [
        [
            f"{num} publisher{'' if num == '1' else 's'}",
            *[
                f"{turn_us:.0f}, {turn_us / each['floor_us'][stage]:.1f}"
                for stage, turn_us in each["turn_us"].items()
            ],
            number(sum(each["memory_mb"].values()), 0),
        ]
        for num, each in runs.items()
    ]
    return [table(titles, rows), f"{found['trajectories']} trajectories, {found['turns']:,} turns."]


def latency(found: dict[str, Any]) -> str:
    """Return the seconds from the last seal until the batch is there, and an empty round trip."""
    wait_s, empty_s = statistics.median(found["after_seal_s"]), found["empty_s"]
    rows = [
        [
            number(wait_s, 3),
            number(found["goal_s"], 2),
            reached(wait_s <= found["goal_s"]),
            number(empty_s * 1000, 2),
            number(wait_s / empty_s, 0),
        ]
    ]
    titles = ["seconds, median", "at most", "", "empty round trip, ms", "times"]
    return table(titles, rows)


def cold(found: dict[str, Any]) -> str:
    """Return the CPU seconds of each start, and the seconds until `turnstream up` is ready."""
    rows = [
        [
            name,
            number(seconds, 2),
            number(seconds / found["floor_s"], 2),
            number(goal_s := found["goals_s"].get(name), 2),
            reached(seconds <= goal_s) if goal_s else "",
        ]
        for name, seconds in found["cpu_s"].items()
    ]
    ready_s, goal_s = found["up_wall_s"], found["up_goal_s"]
    ready = (
        f"The floor takes {found['floor_s']:.2f} CPU s. `turnstream up` was ready after "
        f"{ready_s:.1f} s; at most {goal_s:.0f} s: {reached(ready_s <= goal_s)}."
    )
    return f"{table(['start', 'CPU s', 'times the floor', 'at most', ''], rows)}\n\n{ready}"


def peers(found: dict[str, Any]) -> str:
    """Return CPU, memory and the first batch of ours and of each way of the peer."""
    rows: list[list[str]] = []
    for name, each in found["ways"].items():
        times, goal = found["times"].get(name), found["goals"].get(name)
        rows.append(
            [
                "ours, durable" if name == "ours" else f"TransferQueue, {name}",
                number(each["cpu_s"], 2),
                number(times, 2),
                number(goal),
                reached(times >= goal) if times and goal else "",
                number(each["first_s"], 2),
                number(found["memory_mb"].get(name, found["memory_mb"]["peer"]), 0),
            ]
        )
    titles = ["", "CPU s", "times ours", "goal", "", "first batch, s", "memory, MB"]
    size = f"{found['trajectories']:,} trajectories, TransferQueue {found['version']}."
    return f"{table(titles, rows)}\n\n{size}"
