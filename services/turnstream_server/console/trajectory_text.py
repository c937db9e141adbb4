"""`turnstream text`: a trajectory as text, its prompts, sampled and masked tokens apart."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
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
from turnstream.store.client.replies import translating
from turnstream.store.run.configs import open_run
from turnstream.types import StoredTurn
from turnstream_server.console.store_client import store_client
from turnstream_server.ledger.queries.trajectory_history import Trajectory, read_history
from turnstream_server.screen import visible

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
