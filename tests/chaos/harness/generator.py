"""A generator process: publishes groups of known content, and logs every call.

Its options let it hang in one trajectory after the first turn, until a file appears; adopt open
trajectories and play refills, without groups of its own.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from harness.episodes import Episode, EpisodeTurn, episode, is_never_adopted
from harness.log import ProcessLog, parse_options
from turnstream.errors import (
    ConflictError,
    EndOfRunError,
    FencedError,
    NotReadyError,
    StoreUnavailableError,
    TurnstreamError,
)
from turnstream.generator import Publisher
from turnstream.generator.api.trajectory_writers import TrajectoryWriter
from turnstream_server.launch.stack import end_when_stdin_closes

_POLL_S = 0.05
_NEVER = Path("/nowhere")
"""A file that does not appear."""

_ADMISSION_S = 300.0
_LONG_S = 1.0
"""A write that takes longer asks why."""


def main() -> None:
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
        adopts_every=0,
        never_adopts_one_in=0,
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
            if not generator.play(number):
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
        # A write waits for its answer, after everything that the publisher resends before.
        self._write_s: float = options.timeout_s + 5.0

    def play(self, number: int) -> bool:
        """Play one group more; False once the run is closed.

        Now and then it also adopts trajectories of others.
        """
        options = self._options
        if options.adopts_every and number % options.adopts_every == 0:
            self._adopt_lapsed()
        return self._play_group(f"{options.writer}-{number}")

    def help(self, end: Path) -> None:
        """Adopt lapsed trajectories and play refills, until a file appears."""
        while not end.exists():
            self._adopt_lapsed()
            self._log.write("asking")
            try:
                refill = self._publisher.next_refill(_POLL_S)
            except NotReadyError:
                self._log.write("no_refill")
                continue
            except StoreUnavailableError as error:
                self._log.write("not_answered", error=repr(error))
                continue
            self._log.write("granted", trajectory=refill.key.trajectory_id)
            self._play_trajectory(self._publisher.refill_trajectory(refill))

    def _play_group(self, group_id: str) -> bool:
        samples: int = self._options.samples
        self._log.write("opening", group=group_id, num_samples=samples)
        group = self._publisher.group(group_id, samples)
        try:
            with self._log.waiting("admission", deadline_s=_ADMISSION_S + 5.0):
                group.__enter__()
        except TurnstreamError as error:
            is_end = isinstance(error, EndOfRunError)
            self._log.write(
                "refused", group=group_id, error="EndOfRunError" if is_end else repr(error)
            )
            return not is_end
        try:
            self._log.write("opened", group=group_id, num_samples=samples)
            for sample in range(samples):
                self._play_trajectory(group.trajectory(sample))
        finally:
            group.__exit__(None, None, None)
        return True

    def _adopt_lapsed(self) -> None:
        """Adopt open trajectories of dead generators, except in groups that nobody adopts."""
        try:
            with self._log.waiting("lapsed", deadline_s=self._write_s):
                found = self._publisher.lapsed()
        except StoreUnavailableError as error:
            self._log.write("not_answered", error=repr(error))
            return
        for lapsed in found:
            if is_never_adopted(lapsed.key.group_id, one_in=self._options.never_adopts_one_in):
                continue
            name = lapsed.key.trajectory_id
            try:
                with self._log.waiting("adoption", deadline_s=self._write_s):
                    writer = self._publisher.adopt(*lapsed.key)
            except (ConflictError, FencedError, StoreUnavailableError) as error:
                self._log.write("not_adopted", trajectory=name, error=repr(error))
                continue
            self._log.write(
                "adopted",
                trajectory=name,
                num_turns=len(writer.turns),
                sampled=[turn.response_ids.tolist() for turn in writer.turns],
            )
            self._play_trajectory(
                writer, before=[EpisodeTurn(t.prompt_ids, t.response_ids) for t in writer.turns]
            )

    def _play_trajectory(
        self, writer: TrajectoryWriter, *, before: Sequence[EpisodeTurn] = ()
    ) -> None:
        """Write the turns after those of an earlier writer, and seal the trajectory."""
        name = writer.key.trajectory_id
        options = self._options
        said = episode(name, writer=options.writer, before=before, num_more=options.more_tokens)
        try:
            for index, turn in enumerate(said.turns[len(before) :], len(before)):
                self._append(writer, index, turn)
                if index == len(before) and name == options.hang_in:
                    self._log.write("hanging", trajectory=name)
                    while not options.hang_until.exists():
                        threading.Event().wait(_POLL_S)
            self._seal(writer, said)
        except TurnstreamError as error:
            self._log.write("refused", trajectory=name, error=repr(error))
            if not writer.has_ended:
                writer.abandon(type(error).__name__)

    def _append(self, writer: TrajectoryWriter, index: int, turn: EpisodeTurn) -> None:
        """Append a turn and wait for its acknowledgement; log the reasons of a long wait."""
        name = writer.key.trajectory_id
        self._log.write("appending", trajectory=name, turn=index)
        receipt = writer.append(
            turn.prompt_ids, turn.response_ids, policy_version=self._options.version
        )
        with self._log.waiting("append", deadline_s=self._write_s):
            until_s = time.monotonic() + self._write_s
            while not receipt.is_done and (left_s := until_s - time.monotonic()) > 0:
                try:
                    receipt.result(min(left_s, _LONG_S))
                except NotReadyError as slow:
                    reasons = [[reason.kind, reason.sentence] for reason in slow.reasons]
                    if not receipt.is_done:
                        self._log.write("wait_reasons", trajectory=name, reasons=reasons)
            receipt.result(0)
        self._log.write("appended", trajectory=name, turn=index)

    def _seal(self, writer: TrajectoryWriter, said: Episode) -> None:
        name = writer.key.trajectory_id
        self._log.write(
            "sealing",
            trajectory=name,
            writer=self._options.writer,
            reward=said.reward,
            rows=said.rows,
            num_trained=said.num_trained,
        )
        with self._log.waiting("seal", deadline_s=self._write_s):
            writer.seal(said.reward)
        self._log.write("sealed", trajectory=name)


if __name__ == "__main__":
    main()
