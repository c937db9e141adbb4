"""The ledger of a run, and its trajectories: their history, and their turns as text."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import redis
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from turnstream.errors import ReleasedError
from turnstream.records.turns import decode_turn
from turnstream.store.client import keys
from turnstream.store.client.fullness import Bytes
from turnstream.store.client.replies import translating
from turnstream.store.run.configs import open_run
from turnstream.types import StoredTurn
from turnstream_server.console.store_client import store_client
from turnstream_server.ledger.queries.ledger import TOP_REASONS, ledger_facts
from turnstream_server.ledger.queries.trajectory_history import Trajectory, read_history
from turnstream_server.screen import cell_text, make_table, time_text, visible


def read_run_ledger(url: str, run: str) -> dict[str, Any]:
    """Return the states of a run's trajectories, with counts, reasons and bytes."""
    with store_client(url) as client:
        return {**ledger_facts(client, open_run(client, run)), "run": run}


def print_ledger(content: Mapping[str, Any], console: Console) -> None:
    """Print a ledger from `read_run_ledger`: each state that occurs, and its main reasons."""
    rows = [
        (name, facts["count"], facts["held_bytes"] or None, _reasons([*facts["reasons"].items()]))
        for name, facts in content["states"].items()
    ]
    columns = ("state", "trajectories", "bytes held", "reasons")
    table = make_table(columns, rows, title=f"ledger of {content['run']}")
    table.add_section()
    budget, origin = Bytes(**content["budget"]), content["origin"]
    table.add_row("accepted", cell_text(content["accepted"]), cell_text(budget.held))
    if origin is not None:
        where = f"by {origin['run']}, up to step {origin['step']}"
        table.add_row("of these", cell_text(origin["num_trajectories"]), "", where)
    console.print(table)
    if content["conflicts"]:
        last = keys.readable_name(content["last_conflict"])
        refused = f"{content['conflicts']:,} writes with another content were refused"
        console.print(f"{refused}, the last: {last}")
    if content["late_rewards"]:
        console.print(f"{content['late_rewards']:,} rewards came after their groups were decided")
    if content["prompts"]["added"]:
        counts = [f"{number:,} {name}" for name, number in content["prompts"].items()]
        console.print(f"prompts: {', '.join(counts)}")
    console.print(f"budget of the run: {_limit(budget.max_bytes)}")
    console.print(f"memory of the server: {budget.used:,} bytes of {_limit(budget.allowed)}")
    if content["full"]:
        console.print(content["full"], highlight=False, soft_wrap=True)


def read_trajectory(url: str, run: str, name: str) -> dict[str, Any]:
    """Return the events of one trajectory, and its state."""
    with store_client(url) as client:
        return asdict(read_history(client, open_run(client, run), name))


def print_trajectory(run: str, content: Mapping[str, Any], console: Console) -> None:
    """Print a trajectory from `read_trajectory`."""
    rows = [(each["name"], _when(each["at_ms"]), each["details"]) for each in content["events"]]
    title = f"{run}: {keys.readable_name(content['trajectory_id'])}"
    table = make_table(("what", "when", "details"), rows, title=title)
    if not content["is_whole"]:
        table.add_row("", "", "older events are no longer stored")
    table.add_section()
    reason, step = content["reason"], content["step"]
    for what, value in (
        ("reward", content["reward"]),
        ("batch", None if step is None else f"step {step}"),
        ("advantage", content["advantage"]),
        ("state", content["state"] + (f": {reason}" if reason else "")),
    ):
        if value is not None:
            table.add_row(what, "", cell_text(value))
    console.print(table)


def _reasons(reasons: Sequence[tuple[str, int]]) -> str:
    """Return the most frequent reasons, a line each, and the number of the others.

    >>> print(_reasons([("no time", 9), *((f"reason {n}", 1) for n in range(5))]))
    9 x no time
    1 x reason 0
    1 x reason 1
    1 x reason 2
    1 x reason 3
    and 1 others, of 1 trajectories
    """
    lines = [f"{count:,} x {reason}" for reason, count in reasons[:TOP_REASONS]]
    others = [count for _, count in reasons[TOP_REASONS:]]
    if others:
        lines.append(f"and {len(others):,} others, of {sum(others):,} trajectories")
    return "\n".join(lines)


def _limit(num_bytes: int) -> str:
    """Return a limit as text; 0 is none."""
    return f"{num_bytes:,} bytes" if num_bytes else "no limit"


def _when(at_ms: int) -> str:
    """Return a time of the server and its age as text."""
    age_s = max(0.0, time.time() - at_ms / 1_000)
    return f"{time_text(at_ms)}, {duration(age_s)} ago"


def duration(seconds: float) -> str:
    """Return a time span in its two largest units.

    >>> duration(4000.0), duration(12.3)
    ('1 h 6 min', '12 s')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, rest_min = divmod(minutes, 60)
    return f"{hours} h {rest_min} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


_STYLES: Final = {"prompt": "dim", "sampled": "bold green", "masked": "yellow"}

Decode = Callable[[Sequence[int]], str]


def segments(turn: StoredTurn) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """Yield the kind and the tokens of each part of a turn: its new prompt, then its response.

    With loss_mask 1 1 0 of the response tokens 5 6 7::

        prompt 3 4, response 5 6 7  ->  prompt [3 4], sampled [5 6], masked [7]
    """
    if len(turn.new_prompt_ids):
        yield "prompt", turn.new_prompt_ids
    mask = turn.loss_mask
    if mask is None:
        mask = np.ones(turn.num_response_tokens, dtype=np.uint8)
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    for start, stop in itertools.pairwise(borders):
        if start < stop:
            yield "sampled" if mask[start] else "masked", turn.response_ids[start:stop]


def print_text(content: dict[str, Any], console: Console) -> None:
    """Print a trajectory from `read_text` turn by turn, in colors on a terminal."""
    console.print(f"{content['run']}: {content['trajectory']}, {content['state']}")
    for turn in content["turns"]:
        versions = ", ".join(map(str, turn["policy_versions"])) or "unknown"
        shared = turn["shared_tokens"]
        before = f", after {shared:,} tokens of turn {turn['parent_turn']}" if shared else ""
        rewards = "" if turn["reward"] is None else f", token rewards {turn['reward']:g}"
        console.rule(f"turn {turn['index']}, policy version {versions}{before}{rewards}")
        for each in turn["segments"]:
            console.print(Text(f"[{each['kind']}: {each['num_tokens']} tokens]", style="cyan"))
            console.print(Text(visible(each["text"]), style=_STYLES[each["kind"]]), soft_wrap=True)
    reward = "none" if content["reward"] is None else f"{content['reward']:g}"
    advantage = content["advantage"]
    console.rule()
    planned = "" if advantage is None else f", advantage {advantage:g} in step {content['step']}"
    console.print(f"reward {reward}{planned}")


def read_text(url: str, run: str, name: str, *, tokenizer: Path) -> dict[str, Any]:
    """Return a trajectory with its turns as text, in plain values."""
    from turnstream_server.generators.chat import load_tokenizer

    decode = functools.partial(load_tokenizer(tokenizer).decode, skip_special_tokens=False)
    with store_client(url) as client:
        run = open_run(client, run)
        history = read_history(client, run, name)
        turns = _read_turns(client, run, history)
    return {
        "run": run,
        "trajectory": keys.readable_name(history.trajectory_id),
        "state": history.state + (f": {history.reason}" if history.reason else ""),
        "reward": history.reward,
        "advantage": history.advantage,
        "step": history.step,
        "turns": [_turn(turn, decode) for turn in turns],
    }


def _read_turns(client: redis.Redis, run: str, history: Trajectory) -> list[StoredTurn]:
    payload = keys.trajectory_keys(run, history.trajectory_id)
    with translating():
        entries: Any = client.xrange(payload.turns)
        is_sealed = client.hget(payload.meta, "sealed") == b"1"
    if not entries:
        raise ReleasedError(
            f"the turns of {keys.readable_name(history.trajectory_id)} are not stored any more: it "
            f"is {history.state}"
        )
    records = [fields[b"r"] for _, fields in entries]
    return [decode_turn(record) for record in (records[:-1] if is_sealed else records)]


def _turn(turn: StoredTurn, decode: Decode) -> dict[str, Any]:
    return {
        "index": turn.index,
        "parent_turn": turn.parent_turn if turn.shared_tokens else None,
        "shared_tokens": turn.shared_tokens,
        "policy_versions": [each.version for each in turn.version_runs if each.version is not None],
        "reward": None if turn.rewards is None else float(turn.rewards.sum()),
        "segments": [
            {"kind": kind, "num_tokens": len(token_ids), "text": decode(token_ids.tolist())}
            for kind, token_ids in segments(turn)
        ],
    }
