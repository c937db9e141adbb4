"""An outbox without a store, whose rounds are taken and answered by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from testkit import turn
from turnstream.generator.encode.encoder import TrajectoryDraft
from turnstream.generator.outbox.calls import (
    Call,
    HeartbeatCall,
    NoteCall,
    ReserveCall,
    Round,
    WaitsCall,
)
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import Delivery
from turnstream.generator.outbox.trajectory_queue import Lane
from turnstream.types import GroupOpened, Status, TrajectoryKey

KEYS = [TrajectoryKey("g", sample) for sample in range(3)]


class Desk:
    """An outbox, a clock, and a hand that answers."""

    def __init__(self, **limits: Any) -> None:
        defaults = {
            "max_inflight_bytes": 1 << 20,
            "timeout_s": 10.0,
            "admission_timeout_s": 60.0,
            "keep_s": 0,
            "address": "10.0.0.7:6379",
        }
        self.outbox = Outbox("r", "w", jitter=lambda: 1.0, **{**defaults, **limits})
        self.now_s = 100.0
        self.drafts = {key: TrajectoryDraft(key) for key in KEYS}

    def opened(self, num_lanes: int = 1, *, sync: Any = "everysec") -> list[Lane]:
        """Lanes that the store has admitted, and `appendfsync` as it says."""
        lanes = self.asked(num_lanes)
        sent = self.take()
        assert sent is not None
        said = sync if isinstance(sync, Exception) else [b"appendfsync", sync.encode()]
        replies = [*[b"sha"] * (sent.num_replies - 2), said, [1] * num_lanes]
        self.outbox.answered(sent, replies=replies, now_s=self.now_s)
        return lanes

    def answer_group(self, *queued: Any, executed: Any) -> Round:
        """Take a round that is one write, and answer it."""
        sent = self.take()
        assert sent is not None
        assert sent.is_grouped
        self.outbox.answered(sent, replies=[b"OK", *queued, executed], now_s=self.now_s)
        return sent

    def asked(self, num_lanes: int = 1, opened: Delivery | None = None) -> list[Lane]:
        """Lanes that ask for leave."""
        group = GroupOpened(group_id="g", prompt_uid="", num_samples=3)
        return self.outbox.admit(group, KEYS[:num_lanes], opened=opened)

    def append(self, lane: Lane, response: str = "B") -> Delivery:
        """Put a turn in."""
        receipt = Delivery()
        self.outbox.append(lane, self.drafts[lane.key].add(turn("a", response)), receipt)
        return receipt

    def stored(self) -> Lane:
        """A lane whose only turn the store has."""
        (lane,) = self.opened()
        self.append(lane)
        self.answer(1)
        return lane

    def seal(self, lane: Lane) -> Delivery:
        """Put the seal in."""
        end = Delivery()
        nothing: dict[str, Any] = dict.fromkeys(
            ("reward_components", "sampling", "tags", "metrics")
        )
        seal = self.drafts[lane.key].seal(reward=1.0, status=Status.COMPLETED, **nothing)
        self.outbox.seal(lane, seal, merged_tokens=2, end=end)
        return end

    def take(self) -> Round | None:
        """The next round."""
        return self.outbox.next_round(self.now_s)

    def answer(self, *answers: Any) -> Round:
        """Take a round and answer its calls; what is left over beside them is answered well."""
        sent = self.take()
        assert sent is not None
        loads = [b"sha"] * (sent.num_replies - len(sent.calls))
        beats = [
            _well(call)
            for call in sent.calls[len(answers) :]
            if isinstance(call, HeartbeatCall | NoteCall | ReserveCall | WaitsCall)
        ]
        self.outbox.answered(sent, replies=[*loads, *answers, *beats], now_s=self.now_s)
        return sent

    def lose(self, error: Exception | None = None) -> Round:
        """Take a round and lose the connection."""
        sent = self.take()
        assert sent is not None
        self.outbox.lost(sent, error=error or RedisConnectionError("gone"), now_s=self.now_s)
        return sent

    def wait_out(self) -> None:
        """Let the pause pass."""
        self.now_s += self.outbox.pause_s(self.now_s) or 0.0

    @staticmethod
    def said(sent: Round) -> list[str]:
        """The scripts that a round calls."""
        return [command.script.name for command in sent.commands]

    @staticmethod
    def records(sent: Round) -> list[int]:
        """How many records every append carries."""
        return [len(c.args) - 3 for c in sent.commands if c.script.name == "append"]

    @staticmethod
    def reserved(sent: Round) -> list[tuple[str, int]]:
        """(trajectory id, bytes) of every reservation that a round asks for."""
        args = [c.args for c in sent.commands if c.script.name == "reserve"]
        return [(str(each[i]), int(each[i + 2])) for each in args for i in range(0, len(each), 3)]


def _well(call: Call) -> Any:
    """Return the reply to a call that belongs to no trajectory."""
    if isinstance(call, HeartbeatCall):
        return [60_000, *[b"OK"] * len(call.lanes)]
    if isinstance(call, WaitsCall):
        return ResponseError("NORUN no such run")
    return call.sizes if isinstance(call, ReserveCall) else 1


@pytest.fixture
def new_desk() -> Callable[..., Desk]:
    """`new_desk(**limits)` makes an outbox, a clock, and a hand that answers."""
    return Desk
