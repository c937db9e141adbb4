"""The command log of a model against a reference: any order, repeats, refusals and crashes."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from testkit.runs.command_logs import CommandLogs
from turnstream.errors import ConflictError, FencedError
from turnstream_server.operations.contents import TRAINING_KINDS, OperationKind
from turnstream_server.operations.keys import RequestId
from turnstream_server.operations.log import Gap, HistoryEntry, Idle, Lost, ModelLog, Run
from turnstream_server.operations.results import Answer, Failure, Result

LONG_S = 1000.0
KINDS: list[OperationKind] = ["forward_backward", "forward_backward", "forward", "optim_step"]
REFUSAL = Failure("refused", "user")


class Entry(NamedTuple):
    """A command of the reference."""

    kind: str
    content: bytes


class Reference:
    """The expected content of the log."""

    def __init__(self) -> None:
        self.commands = {0: Entry("create", b"")}
        self.results: dict[int, Result] = {}
        self.bodies = {0}
        self.passes: dict[int, int] = {}
        self.executed: list[Run] = []
        self.covered = -1
        self.gap = -1

    @property
    def next_number(self) -> int:
        """The lowest number without a result."""
        return next(each for each in range(len(self.results) + 1) if each not in self.results)

    def submit(self, number: int, entry: Entry, *, is_refused: bool) -> None:
        """Append a new command."""
        self.commands[number] = entry
        if is_refused:
            self.results[number] = REFUSAL
        else:
            self.bodies.add(number)

    def take(self, *, gap_s: float) -> Any:
        """Return the expected work of a worker."""
        first = self.next_number
        if first not in self.commands:
            newest = max(self.commands)
            if newest < first:
                return Idle()
            if self.gap != first or gap_s:
                self.gap = first
                return Gap
            failed = [each for each in range(first, newest + 1) if each not in self.results]
            for each in failed:
                self.commands.setdefault(each, Entry("missing", b""))
                self.results[each] = REFUSAL
                self.bodies.discard(each)
            return Lost(first, tuple(failed))
        kind = self.commands[first].kind
        last = first
        if kind in TRAINING_KINDS:
            last = self.passes.get(first, first)
            while first not in self.passes and self._shares(last + 1, kind):
                last += 1
            self.passes[first] = last
        return Run(first, last, kind)  # pyright: ignore[reportArgumentType]

    def _shares(self, number: int, kind: str) -> bool:
        known = self.commands.get(number)
        return known is not None and known.kind == kind and number not in self.results

    def finish(self, run: Run, results: dict[int, Result]) -> None:
        """Record results."""
        self.results |= results
        self.executed.append(run)
        self.bodies -= {each for each, result in results.items() if isinstance(result, Failure)}
        if run.kind == "forward":
            self.bodies -= {*run.numbers}

    def cover(self, number: int) -> None:
        """Record a checkpoint."""
        self.covered = number
        self.bodies = {each for each in self.bodies if each > number}

    def history(self) -> list[HistoryEntry]:
        """Return the commands that a new worker must run again: a `forward` changes nothing."""
        again = [run for run in self.executed if run.first > self.covered and run.kind != "forward"]
        failed = [
            frozenset(each for each in run.numbers if isinstance(self.results[each], Failure))
            for run in again
        ]
        pairs = zip(again, failed, strict=True)
        return [HistoryEntry(*pair) for pair in pairs if len(pair[1]) < len(pair[0].numbers)]


class LogMachine(RuleBasedStateMachine):
    """Gateways that submit, and workers that run, crash and are replaced."""

    logs: ClassVar[CommandLogs]

    @initialize()
    def create(self) -> None:
        """Create a model with one worker."""
        self.model_id = self.logs.new_model()
        self.expected = Reference()
        self.stored: dict[int, Any] = {}
        self.log = self._acquired("w0")
        self.run: Run | None = None

    @rule(
        number=st.integers(1, 14),
        kind=st.sampled_from(KINDS),
        content=st.sampled_from([b"a", b"b"]),
        is_refused=st.integers(0, 4).map(lambda value: value == 0),
    )
    def submit(self, number: int, kind: OperationKind, content: bytes, is_refused: bool) -> None:
        """Submit a number: new, repeated, or with another content."""
        known = self.expected.commands.get(number)
        entry = Entry(kind, content)
        refusal = REFUSAL if is_refused else None
        if known is not None and known.kind != "missing" and known != entry:
            with pytest.raises(ConflictError, match=f"seq_id {number}"):
                self.logs.submit(self.model_id, number, kind, content, refusal=refusal)
            return

        request_id = self.logs.submit(self.model_id, number, kind, content, refusal=refusal)

        assert request_id == RequestId(self.model_id, number)
        if known is None:
            self.expected.submit(number, entry, is_refused=is_refused)

    @rule(gap_s=st.sampled_from([0.0, LONG_S]))
    def take(self, gap_s: float) -> None:
        """Take what is next."""
        expected = self.expected.take(gap_s=gap_s)

        work = self.log.take(gap_s=gap_s)

        if expected is Gap:
            assert isinstance(work, Gap)
            assert work.missing == self.expected.next_number
            return
        assert work == expected
        self.run = work if isinstance(work, Run) else None
        if self.run is not None:
            before = self.logs.results(self.model_id)
            assert all(each in before for each in range(self.run.first))

    @precondition(lambda self: self.run is not None)
    @rule(fails=st.integers(0, 7))
    def finish(self, fails: int) -> None:
        """Finish what was taken, and try to change a result."""
        run = self.run
        assert run is not None
        results: dict[int, Result] = {
            each: REFUSAL if fails >> place % 3 & 1 else Answer({"n": each})
            for place, each in enumerate(run.numbers)
        }
        self.expected.finish(run, results)
        self.run = None

        self.log.finish(results)
        self.log.finish(dict.fromkeys(results, Answer({"n": "another"})))

    @precondition(lambda self: self.expected.executed)
    @rule()
    def cover(self) -> None:
        """Cover all finished commands."""
        number = self.expected.next_number - 1
        self.expected.cover(number)

        self.log.cover(number, checkpoint=f"c{number}")

    @rule(worker=st.sampled_from(["w0", "w1"]))
    def crash(self, worker: str) -> None:
        """Drop the worker at any place; another one takes over."""
        old, old_worker = self.log, self.worker
        if worker != old_worker:
            old.renew(lease_s=0)
        self.run = None

        self.log = self._acquired(worker)

        assert (self.log.covered, self.log.checkpoint) == (
            self.expected.covered,
            f"c{self.expected.covered}" if self.expected.covered >= 0 else "",
        )
        assert [*self.log.history()] == self.expected.history()
        for write in (
            lambda: old.take(gap_s=0.0),
            lambda: old.finish({1: Answer({})}),
            lambda: old.cover(0, checkpoint="old"),
            lambda: old.renew(lease_s=1.0),
            lambda: [*old.history(), old.take()],
        ):
            with pytest.raises(FencedError):
                write()

    @invariant()
    def store_has_the_expected_results_and_bodies(self) -> None:
        """Compare the store with the reference; no result has changed."""
        if not hasattr(self, "log"):
            return
        results, expected = self.logs.results(self.model_id), self.expected.results
        assert {number: results[number] for number in self.stored} == self.stored
        assert set(results) == set(expected)
        answers = {number for number, result in expected.items() if isinstance(result, Answer)}
        assert all(results[number] == expected[number] for number in answers)
        assert self.logs.numbers_with_bodies(self.model_id) == self.expected.bodies
        self.stored = results

    def _acquired(self, worker: str) -> ModelLog:
        self.worker = worker
        return self.logs.acquire(self.model_id, worker)


@pytest.mark.hypothesis
def test_log_behaves_as_the_reference(logs: CommandLogs) -> None:
    class Machine(LogMachine):
        pass

    Machine.logs = logs

    run_state_machine_as_test(Machine, settings=settings(stateful_step_count=40))
