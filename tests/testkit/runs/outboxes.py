"""An outbox without a store: a test takes its rounds and answers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from testkit.turns import turn
from turnstream.generator.encode.encoder import TrajectoryDraft
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import PendingWrite
from turnstream.generator.outbox.writes import Call, Round, TrajectoryQueue
from turnstream.generator.transport.transport import num_replies, parse_replies
from turnstream.types import GroupOpened, Status, TrajectoryKey

KEYS = [TrajectoryKey("g", sample) for sample in range(3)]


class OutboxDriver:
    """An outbox, its clock, and the answers of its store."""

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

    def open_queues(self, num_queues: int = 1, *, sync: Any = "everysec") -> list[TrajectoryQueue]:
        """Return the trajectories of an admitted group; `sync` is the store's `appendfsync`."""
        queues = self.request(num_queues)
        sent = self.take_round()
        setting = sync if isinstance(sync, Exception) else [b"appendfsync", sync.encode()]
        replies = [*[b"sha"] * (num_replies(sent) - 2), setting, [1] * num_queues]
        self.answered(sent, replies)
        return queues

    def answer_group(self, *queued: Any, executed: Any) -> Round:
        """Take a round that is one transaction, and answer it."""
        sent = self.take_round()
        assert sent.is_grouped
        self.answered(sent, [b"OK", *queued, executed])
        return sent

    def request(
        self, num_queues: int = 1, opened: PendingWrite | None = None
    ) -> list[TrajectoryQueue]:
        """Return the trajectories of a group that requests admission."""
        group = GroupOpened(group_id="g", prompt_uid="", num_samples=3)
        return self.outbox.admissions.request(group, KEYS[:num_queues], opened=opened)

    def append(self, queue: TrajectoryQueue, response: str = "B") -> PendingWrite:
        """Append a turn."""
        receipt = PendingWrite()
        self.outbox.append(queue, self.drafts[queue.key].add(turn("a", response)), receipt)
        return receipt

    def open_with_turn(self) -> TrajectoryQueue:
        """Return a trajectory with one acknowledged turn."""
        (queue,) = self.open_queues()
        self.append(queue)
        self.answer(1)
        return queue

    def seal(self, queue: TrajectoryQueue) -> PendingWrite:
        """Seal the trajectory of a trajectory."""
        end = PendingWrite()
        nothing: dict[str, Any] = dict.fromkeys(
            ("reward_components", "sampling", "tags", "metrics")
        )
        seal = self.drafts[queue.key].seal(reward=1.0, status=Status.COMPLETED, **nothing)
        self.outbox.seal(queue, seal, end=end)
        return end

    def take(self) -> Round | None:
        """Return the next round."""
        return self.outbox.next_round(self.now_s)

    def take_round(self) -> Round:
        """Return the next round, which must exist."""
        sent = self.take()
        assert sent is not None
        return sent

    def reconnect(self) -> Round:
        """Lose the next round with its connection; advance the clock to the next send."""
        lost = self.lose_round()
        self.skip_pause()
        return lost

    def restart(self) -> None:
        """Lose a round, with a call if none waits; a restarted store answers the next."""
        if self.outbox.is_idle:
            self.outbox.run_calls.close_run("", PendingWrite())
        self.reconnect()
        self.answer()

    def answer(self, *answers: Any) -> Round:
        """Take a round and answer its calls; calls without an answer here succeed."""
        sent = self.take_round()
        loads = [b"sha"] * (num_replies(sent) - len(sent.calls))
        beats = [
            success_of(call)
            for call in sent.calls[len(answers) :]
            if not call.is_write or call.request.command.script.name == "note_conflict"
        ]
        self.answered(sent, [*loads, *answers, *beats])
        return sent

    def answered(self, sent: Round, replies: Sequence[Any]) -> None:
        """Pass the replies of a server to the outbox."""
        self.outbox.answered(sent, parse_replies(sent, replies), now_s=self.now_s)

    def lose_round(self) -> Round:
        """Take a round and lose the connection."""
        sent = self.take_round()
        self.outbox.lost(sent, error=RedisConnectionError("gone"), now_s=self.now_s)
        return sent

    def skip_pause(self) -> None:
        """Advance the clock to the next send."""
        self.now_s += self.outbox.pause_s(self.now_s) or 0.0

    def skip_to_deadline(self) -> None:
        """Advance the clock to the next deadline of a wait."""
        left_s = self.outbox.ends_in_s(self.now_s)
        assert left_s is not None
        self.now_s += left_s

    @staticmethod
    def script_names(sent: Round) -> list[str]:
        """Return the scripts of a round."""
        return [command.script.name for command in sent.commands]

    @staticmethod
    def record_counts(sent: Round) -> list[int]:
        """Return the number of records of each append."""
        return [len(c.args) - 3 for c in sent.commands if c.script.name == "append"]

    @staticmethod
    def reservations(sent: Round) -> list[tuple[str, int]]:
        """Return (trajectory id, bytes) of each reservation of a round."""
        args = [c.args for c in sent.commands if c.script.name == "reserve"]
        return [(str(each[i]), int(each[i + 2])) for each in args for i in range(0, len(each), 3)]


def success_of(call: Call) -> Any:
    """Return the reply to a call that belongs to no trajectory."""
    match call.request.command.script.name:
        case "heartbeat":
            return [60_000, *[b"OK"] * (len(call.request.command.args) // 2)]
        case "read_waits":
            return ResponseError("NORUN no such run")
        case "reserve":
            return [int(size) for size in call.request.command.args[2::3]]
        case _:
            return 1


def driver_with_seal(**limits: Any) -> tuple[OutboxDriver, TrajectoryQueue, PendingWrite]:
    """Return an outbox with one trajectory whose seal is stored, and posted next."""
    driver, queue = driver_with_queue(**limits)
    driver.append(queue)
    end = driver.seal(queue)
    driver.answer(2)
    return driver, queue, end


def driver_with_queue(
    *, sync: str = "everysec", **limits: Any
) -> tuple[OutboxDriver, TrajectoryQueue]:
    """Return an outbox with one open trajectory."""
    driver = OutboxDriver(**limits)
    (queue,) = driver.open_queues(sync=sync)
    return driver, queue
