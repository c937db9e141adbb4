"""A generator process: publishes groups of known content, and logs every call.

By its options it may do the following:

- It hangs in one trajectory, after its first turn, until a file appears.
- It helps: it adopts open trajectories and takes refills, without groups of its own.
- It takes tasks instead of groups of its own, or evaluates now and then.
- It leaves the rewards of some trajectories to another process (harness.poster).
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from harness.episodes import Episode, EpisodeTurn, awaits_reward, episode, left_alone
from harness.log import ProcessLog, parse_options
from turnstream.errors import (
    ConflictError,
    EndOfRunError,
    FencedError,
    NotReadyError,
    PromptsExhaustedError,
    StoreUnavailableError,
    TurnstreamError,
)
from turnstream.generator import Publisher
from turnstream.generator.api.trajectory_writers import TrajectoryWriter
from turnstream.generator.outbox.receipts import Receipt
from turnstream.store.client import keys
from turnstream.types import TrajectoryKey
from turnstream_server.jobs.stack import end_when_stdin_closes

_POLL_S = 0.05
_NEVER = Path("/nowhere")
"""A file that does not appear."""

_ADMISSION_S = 300.0
_LONG_S = 1.0
"""A write that takes longer asks why."""


def main() -> None:
    """Publish until the groups are done, the run is closed or the process is killed."""
    end_when_stdin_closes()
    options = parse_options(
        *("url", "run", "writer"),
        first=0,
        groups=0,
        samples=2,
        more_tokens=0,
        version=int,
        to_disk=0,
        keep_s=5.0,
        pause_s=0.0,
        timeout_s=300.0,
        hang_in="",
        hang_until=_NEVER,
        helps_until=Path,
        takes_tasks=0,
        evaluates_every=0,
        takes_over_every=0,
        leaves_one_in=0,
        awaits_one_in=0,
    )
    with (
        ProcessLog(options.log) as log,
        Publisher(
            options.url,
            options.run,
            writer=options.writer,
            timeout_s=options.timeout_s,
            admission_timeout_s=_ADMISSION_S,
            keep_s=options.keep_s,
        ) as publisher,
    ):
        log.usage = lambda: _usage(publisher)
        generator = _Generator(publisher, log, options)
        for number in range(options.first, options.first + options.groups):
            if not generator.go_on(number):
                break
            threading.Event().wait(options.pause_s)
        if options.helps_until is not None:
            generator.help(options.helps_until)
        publisher.flush()
        if options.to_disk:
            publisher.flush_to_disk()
        log.write("done", **_usage(publisher))


def _usage(publisher: Publisher) -> dict[str, int]:
    statistics = publisher.statistics()
    return {
        "held_bytes": statistics.inflight_bytes,
        "max_held_bytes": statistics.max_inflight_bytes,
        "duplicates": statistics.num_duplicates,
        "retries": statistics.num_retries,
        "restarts": statistics.num_restarts,
        "waits": statistics.num_waits,
    }


class _Generator:
    def __init__(self, publisher: Publisher, log: ProcessLog, options: argparse.Namespace) -> None:
        self._publisher = publisher
        self._log = log
        self._options = options
        # A write waits for its answer, and behind it for what the publisher resends before.
        self._write_s: float = options.timeout_s + 5.0

    def go_on(self, number: int) -> bool:
        """One group more, and an evaluation now and then; False once the run takes no more.

        Now and then it also looks for what others have left open.
        """
        every = self._options.takes_over_every
        if every and number % every == 0:
            self.take_over_lapsed()
        if self._options.takes_tasks:
            return self._take()
        every, name = self._options.evaluates_every, f"{self._options.writer}-{number}"
        if every and number % every == 0 and not self._play(f"{name}-eval", purpose="eval"):
            return False
        return self._play(name)

    def _take(self) -> bool:
        """One task; False once the run takes no more."""
        self._log.write("asking_task", num_samples=self._options.samples)
        try:
            with self._log.waiting("task", deadline_s=_ADMISSION_S + 5.0):
                task = self._publisher.next_task(_ADMISSION_S)
        except (EndOfRunError, NotReadyError, PromptsExhaustedError) as error:
            self._log.write("asked_task_in_vain", num_samples=self._options.samples)
            return not isinstance(error, EndOfRunError)
        except StoreUnavailableError as error:  # it may have been given, and is asked for again
            self._log.write("not_answered", error=repr(error))
            return True
        with task:
            self._log.write(
                "given",
                group=keys.encode_name(task.group_id),
                num_samples=task.num_samples,
                trajectories=[writer.key.trajectory_id for writer in task.trajectories],
                prompt=task.prompt_uid,
                payload=task.payload.decode(),
            )
            for writer in task.trajectories:
                self._play_sample(writer)
        return True

    def _play(self, group_id: str, *, purpose: str = "train") -> bool:
        """One group; False once the run takes no more."""
        samples: int = self._options.samples
        self._log.write("opening", group=group_id, num_samples=samples, purpose=purpose)
        group = self._publisher.group(group_id, samples, purpose=purpose)
        try:
            with self._log.waiting("admission", deadline_s=_ADMISSION_S + 5.0):
                group.__enter__()
        except EndOfRunError:
            self._log.write("refused", group=group_id, error="EndOfRunError")
            return False
        except TurnstreamError as error:
            self._log.write("refused", group=group_id, error=repr(error))
            return True
        try:
            self._log.write("opened", group=group_id, num_samples=samples)
            for sample in range(samples):
                self._play_sample(group.trajectory(sample))
        finally:
            group.__exit__(None, None, None)
        return True

    def help(self, end: Path) -> None:
        """Take over what lapses and take what is to be tried again, until a file appears."""
        while not end.exists():
            self.take_over_lapsed()
            self._log.write("asking")
            try:
                refill = self._publisher.next_refill(_POLL_S)
            except NotReadyError:
                self._log.write("asked_in_vain")
                continue
            self._log.write("granted", trajectory=refill.key.trajectory_id)
            self._play_sample(self._publisher.refill_trajectory(refill))

    def take_over_lapsed(self) -> None:
        """Adopt open trajectories of dead generators, except in groups that are left alone."""
        try:
            with self._log.waiting("lapsed", deadline_s=self._write_s):
                found = self._publisher.lapsed()
        except StoreUnavailableError as error:
            self._log.write("not_answered", error=repr(error))
            return
        for lapsed in found:
            if not left_alone(lapsed.key.group_id, one_in=self._options.leaves_one_in):
                self._take_over(lapsed.key)

    def _take_over(self, key: TrajectoryKey) -> None:
        try:
            with self._log.waiting("take-over", deadline_s=self._write_s):
                writer = self._publisher.adopt(*key)
        except (ConflictError, FencedError, StoreUnavailableError) as error:
            self._log.write("not_taken", trajectory=key.trajectory_id, error=repr(error))
        else:
            self._go_on(writer)

    def _go_on(self, writer: TrajectoryWriter) -> None:
        name = writer.key.trajectory_id
        before = [
            EpisodeTurn(prompt_ids=t.prompt_ids, response_ids=t.response_ids) for t in writer.turns
        ]
        sampled = [turn.response_ids.tolist() for turn in before]
        self._log.write(
            "taken",
            trajectory=name,
            num_turns=len(before),
            sampled=sampled,
            num_samples=self._options.samples,
        )
        said = self._episode(name, before)
        self._play_said(writer, name, said, first=len(before))

    def _episode(self, name: str, before: Sequence[EpisodeTurn] = ()) -> Episode:
        options = self._options
        return episode(name, writer=options.writer, before=before, num_more=options.more_tokens)

    def _hang(self, name: str) -> None:
        if name == self._options.hang_in:
            self._log.write("hanging", trajectory=name)
            while not self._options.hang_until.exists():
                threading.Event().wait(_POLL_S)

    def _play_sample(self, writer: TrajectoryWriter) -> None:
        name = writer.key.trajectory_id
        self._play_said(writer, name, self._episode(name))

    def _play_said(
        self, writer: TrajectoryWriter, name: str, said: Episode, *, first: int = 0
    ) -> None:
        try:
            self._write(writer, name, said, first=first)
        except TurnstreamError as error:
            self._log.write("refused", trajectory=name, error=repr(error))
            if not writer.has_ended:
                writer.abandon(type(error).__name__)

    def _write(self, writer: TrajectoryWriter, name: str, said: Episode, *, first: int = 0) -> None:
        for index, turn in enumerate(said.turns[first:], first):
            self._log.write("appending", trajectory=name, turn=index)
            receipt = writer.append(
                turn.prompt_ids, turn.response_ids, policy_version=self._options.version
            )
            with self._log.waiting("append", deadline_s=self._write_s):
                self._wait_for(receipt, name)
            self._log.write("appended", trajectory=name, turn=index)
            if index == first:
                self._hang(name)
        awaits = awaits_reward(name, one_in=self._options.awaits_one_in)
        reward = None if awaits else said.reward
        self._log.write(
            "sealing",
            trajectory=name,
            writer=self._options.writer,
            awaits=awaits,
            reward=reward,
            rows=said.rows,
            num_trained=said.num_trained,
        )
        with self._log.waiting("seal", deadline_s=self._write_s):
            writer.seal(reward, awaits_reward=awaits)
        self._log.write("sealed", trajectory=name)

    def _wait_for(self, receipt: Receipt, name: str) -> None:
        """Until the store has it; notes again and again why that takes so long."""
        until_s = time.monotonic() + self._write_s
        while not receipt.is_done and (left_s := until_s - time.monotonic()) > 0:
            try:
                receipt.result(min(left_s, _LONG_S))
            except NotReadyError as slow:
                if not receipt.is_done:
                    self._log.write(
                        "told_to_wait",
                        trajectory=name,
                        reasons=[[reason.kind, reason.sentence] for reason in slow.reasons],
                    )
        receipt.result(0)  # where it was done just when a wait had ended, that it was counts


if __name__ == "__main__":
    main()
