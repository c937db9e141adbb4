"""Later turns without a script have the entries of the script, also after losses and restarts."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from simulator.guards import Break, both, condition, script
from simulator.store.clients import error_of, words_of
from simulator.store.store import Store
from simulator.store.values import StoreError
from testkit.runs.outboxes import OutboxDriver, success_of
from testkit.runs.scripts import script as script_named
from turnstream.generator.outbox import writes
from turnstream.generator.outbox.trajectories import TrajectoryTracker
from turnstream.generator.outbox.writes import Call
from turnstream.generator.requests import SCRIPTS, AppendTurns, OpenGroup, PostSeals
from turnstream.generator.transport.transport import num_replies
from turnstream.store.client.keys import trajectory_keys

NAME = "g/0/0"
KEYS = trajectory_keys("r", NAME)
ENDLESS_S = 1e9
NUM_SEEDS = 300
NUM_COMPARED = 100


class Rig:
    """One publisher and its store.

    Attributes:
        late: commands of lost rounds that arrive later.
        num_direct: turns that were stored without a script.
    """

    def __init__(self, seed: int, *, keep_s: float) -> None:
        self.rng = random.Random(seed)
        self.store = Store()
        self.driver = OutboxDriver(
            keep_s=keep_s, timeout_s=ENDLESS_S, admission_timeout_s=ENDLESS_S
        )
        (self.queue,) = self.driver.request()
        self.late: list[Sequence[bytes]] = []
        self.num_direct = 0
        self._is_cut_off = False
        self._saved: Any = self.store.save()
        self.load_scripts()

    def load_scripts(self) -> None:
        """Load the scripts into a new start of the store."""
        for each in (*SCRIPTS, script_named("release_payload")):
            self.execute("SCRIPT", "LOAD", each.source)

    def execute(self, *words: Any) -> Any:
        """Return the reply of the store, or its error."""
        try:
            return self.store.execute(words_of(words))
        except StoreError as error:
            return error_of(error)

    def append(self) -> None:
        """Append a turn of random length."""
        if not self.queue.is_ending:
            self.driver.append(self.queue, response="B" * self.rng.choice((1, 9, 200)))

    def seal(self) -> None:
        """Seal the trajectory if it has turns."""
        if not self.queue.is_ending and self.queue.num_bytes:
            self.driver.seal(self.queue)

    def exchange(self) -> bool:
        """Send a round and answer it; return whether there was one."""
        if self._is_cut_off:
            return self.lose()
        sent = self.driver.take()
        if sent is None:
            return False
        loads: list[Any] = [b"sha"] * (num_replies(sent) - len(sent.calls))
        if sent.is_first:
            loads[-2:] = [b"run_id:%b" % self.store.run_id, [b"appendfsync", b"everysec"]]
        pairs = zip(sent.calls, sent.words, strict=True)
        self.driver.answered(sent, [*loads, *[self._reply(*pair) for pair in pairs]])
        self.driver.now_s += 0.01
        return True

    def lose(self, num_done: int = 0) -> bool:
        """Carry out the first commands of a round, keep the others for later, and lose it.

        After a restart nothing of it arrives.
        """
        sent = self.driver.take()
        if sent is None:
            return False
        pairs = [] if self._is_cut_off else [*zip(sent.calls, sent.words, strict=True)]
        self._is_cut_off = False
        for call, words in pairs[:num_done]:
            self._reply(call, words)
        late = [words for call, words in pairs[num_done:] if isinstance(call.request, AppendTurns)]
        self.late += [words_of(words) for words in late]
        error = RedisConnectionError("gone")
        self.driver.outbox.lost(sent, error=error, now_s=self.driver.now_s)
        self.driver.skip_pause()
        return True

    def deliver(self) -> None:
        """Let the oldest late command arrive."""
        if self.late:
            with contextlib.suppress(StoreError):
                self.store.execute(self.late.pop(0))

    def save(self) -> None:
        """Sync the store to its disk."""
        self._saved = self.store.save()

    def cut(self, *, is_seen: bool = True) -> None:
        """Restart the store with what it had saved; a proxy may hide that."""
        self.store.load(self._saved)
        self.load_scripts()
        self._is_cut_off = is_seen
        if is_seen:
            self.late.clear()

    def finish(self) -> None:
        """Send all that waits."""
        while self.exchange() or not self.driver.outbox.is_idle:
            self.driver.skip_pause()

    @property
    def entries(self) -> list[tuple[int, bytes]]:
        """The number and the record of each entry."""
        found = self.execute("XRANGE", KEYS.turns, "-", "+")
        return [(int(name.partition(b"-")[2]), fields[1]) for name, fields in found]

    @property
    def meta(self) -> dict[bytes, bytes]:
        """The fields beside the entries."""
        words = self.execute("HGETALL", KEYS.meta)
        return dict(zip(words[::2], words[1::2], strict=True))

    def _reply(self, call: Call, words: Sequence[Any]) -> Any:
        match call.request:
            case OpenGroup():
                return [1]
            case PostSeals():
                return [b"OK"]
            case AppendTurns():
                reply = self.execute(*words)
                self.num_direct += isinstance(reply, bytes)
                return reply
            case _:
                return success_of(call)


def written(seed: int) -> Rig:
    """Write a trajectory through faults that the publisher survives."""
    rig = Rig(seed, keep_s=ENDLESS_S)
    choices = random.Random(seed)
    acts = {
        "append": (rig.append, 6),
        "exchange": (rig.exchange, 6),
        "lose": (lambda: rig.lose(choices.choice((0, 1))), 1),
        "deliver": (rig.deliver, 1),
        "save": (rig.save, 1),
        "cut": (rig.cut, 1),
    }
    shares = [share for _, share in acts.values()]
    for name in choices.choices([*acts], shares, k=choices.randrange(60)):
        acts[name][0]()
    rig.append()
    rig.seal()
    rig.finish()
    return rig


def test_both_ways_store_the_same_entries() -> None:
    num_direct = 0
    for seed in range(NUM_COMPARED):
        with patch.object(writes, "MAX_DIRECT_BYTES", -1):
            by_script = written(seed)
        direct = written(seed)

        assert by_script.num_direct == 0
        assert (direct.entries, direct.meta) == (by_script.entries, by_script.meta), seed
        assert [number for number, _ in direct.entries] == [*range(1, len(direct.entries) + 1)]
        assert direct.meta[b"sealed"] == b"1", seed
        num_direct += direct.num_direct
    assert num_direct > NUM_COMPARED


class Owners(Rig):
    """A publisher whose trajectory is adopted, opened by another writer, sealed and released."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, keep_s=0.0)
        self._epoch = 1
        self._writer = "w"
        self._num_made = 0
        self._is_hidden = False

    def adopt(self) -> None:
        """Adopt it, by a first call without a record."""
        if self._call(self._epoch + 1, "b", ":") == 0:
            self._epoch, self._writer = self._epoch + 1, "b"

    def open_again(self) -> None:
        """Open it for another writer, after the store has lost everything of it."""
        if not self.meta and not self._is_hidden:
            self._epoch, self._writer = 1, "x"
            self._call(1, "x", ":")

    def continue_adopted(self, *, seals: bool = False) -> None:
        """Add a turn or the seal of the newest writer."""
        if self._writer != "w" and b"released" not in self.meta:
            self._num_made += 1
            record = b"%s of %s %04d" % (b"turn", self._writer.encode(), self._num_made)
            self._call(self._epoch, self._writer, "/", record, seals=seals)

    def release(self) -> None:
        """Delete the payload of a sealed trajectory."""
        if self.meta.get(b"sealed") == b"1":
            self.execute(*script_named("release_payload")(KEYS, 900_000, "over").words)

    def seal(self) -> None:
        """Seal after the answers of all turns: the store then has the stream."""
        for _ in range(5):
            self.exchange()
        super().seal()

    def send_beyond_seal(self) -> None:
        """Send a turn that follows the seal, as a publisher that missed a restart may do."""
        if self._writer == "w" and self.meta.get(b"sealed") == b"1":
            beyond = AppendTurns("r", "w", NAME, 1, True, len(self.entries), [b"beyond0000"])
            self.execute(*beyond.direct_words)

    def save(self) -> None:
        """Sync the store, which has the owner too."""
        super().save()
        self._saved_owner = self._epoch, self._writer

    def cut(self, *, is_seen: bool = True) -> None:
        """Restart the store, which returns to the owner that it had saved."""
        super().cut(is_seen=is_seen)
        self._epoch, self._writer = getattr(self, "_saved_owner", (1, "w"))
        self._is_hidden |= not is_seen

    def _call(
        self, epoch: int, writer: str, kind: str, *records: bytes, seals: bool = False
    ) -> Any:
        first = len(self.entries) if records else 0
        words = AppendTurns(
            *("r", writer, NAME, epoch, kind == "/", first, records, seals)
        ).command.words
        return self.execute(*words)

    def check(self, before: list[tuple[int, bytes]], meta: dict[bytes, bytes], act: str) -> None:
        """Entries are added by the writer, before the seal, and are sealed without a gap."""
        if act in ("cut", "hidden cut", "release"):
            return
        entries, own = self.entries, self.meta
        added = entries[len(before) :]
        assert entries[: len(before)] == before
        assert not added or meta.get(b"sealed") != b"1", f"{act} adds {added} behind the seal"
        assert not added or b"released" not in meta, f"{act} adds {added} after the release"
        for _, record in added:
            maker = record[8:9].decode() if record.startswith(b"turn of") else "w"
            assert maker == own[b"writer"].decode(), f"{act} adds a turn of {maker} for {own}"
        if own.get(b"sealed") == b"1":
            numbers = [number for number, _ in entries]
            assert numbers == [*range(1, len(numbers) + 1)], f"{act}: sealed with {numbers}"


def run_owners(seed: int) -> None:
    rig = Owners(seed)
    choices = random.Random(seed)
    hides = seed % 3 == 0  # a proxy hides the restarts
    acts = {
        "append": (rig.append, 8),
        "exchange": (rig.exchange, 8),
        "lose": (lambda: rig.lose(choices.choice((0, 1))), 1),
        "deliver": (rig.deliver, 3),
        "save": (rig.save, 2 if hides else 0.4),
        "cut": (rig.cut, 1.5 * (not hides)),
        "hidden cut": (lambda: rig.cut(is_seen=False), 1.5 * hides),
        "adopt": (rig.adopt, 0.6),
        "open again": (rig.open_again, 8),
        "turn": (rig.continue_adopted, 3),
        "seal": (rig.seal, 0.6),
        "beyond": (rig.send_beyond_seal, 2),
        "other seal": (lambda: rig.continue_adopted(seals=True), 0.5),
        "release": (rig.release, 0.3),
    }
    shares = [share for _, share in acts.values()]
    for name in choices.choices([*acts], shares, k=50):
        before, meta = rig.entries, rig.meta
        acts[name][0]()
        rig.check(before, meta, name)


def first_failed(broken: Break = contextlib.nullcontext) -> str:
    with broken():
        for seed in range(NUM_SEEDS):
            try:
                run_owners(seed)
            except AssertionError as error:
                return f"seed {seed}: {error}"
    return ""


def test_late_turns_are_refused_after_adoption_seal_and_release() -> None:
    assert not first_failed()


def _any_connection() -> Any:
    same = property(lambda _: 1, lambda *_: None)
    return patch.object(TrajectoryTracker, "connection", same, create=True)


GUARDS: dict[str, Break] = {
    "the raise at an adoption": script("(epoch ~= '1' or seals)", "seals"),
    "the raise at a seal": script("(epoch ~= '1' or seals)", "epoch ~= '1'"),
    "the rule of the same connection": _any_connection,
    "the count in the seal": both(
        condition("if first > turns then"),
        script(
            "math.min(turns - first, num_turns)", "math.max(0, math.min(turns - first, num_turns))"
        ),
    ),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_broken_guard_of_later_turns_is_seen(guard: str) -> None:
    assert first_failed(GUARDS[guard])
