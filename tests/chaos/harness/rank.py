"""One rank of a trainer, without a model: it notes what it would have trained.

Its weights are the list of what was trained into them, and a checkpoint is that list and the
recovery token. All ranks meet behind every step, as an all-reduce makes them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from harness.episodes import row_name
from harness.log import ProcessLog, parse_options
from turnstream.batching.scoring.denominators import num_trained
from turnstream.errors import TurnstreamError
from turnstream.types import RecoveryToken, Rows
from turnstream.worker import BatchStream, PulledMiniBatch
from turnstream_server.failpoints import arm, failpoint
from turnstream_server.launch.stack import end_when_stdin_closes

MAX_PREFETCH_BYTES = 4 << 20
_POLL_S = 0.005
_SLACK_S = 3.0


class PeerLostError(Exception):
    """Another rank did not come to the end of the step."""


def main() -> None:
    """Train until the run ends or a step is reached; exits with 3 after an error that is typed."""
    end_when_stdin_closes()
    options = parse_options(
        *("target", "run", "session"),
        folder=Path,
        dp_rank=0,
        dp_world_size=1,
        failpoint="",
        from_step=-1,
        max_steps=0,
        checkpoint_every=2,
        version_jump=1,
        update_s=0.0,
        timeout_s=60.0,
        barrier_s=float,
    )
    arm(options.failpoint)
    status = 0
    with ProcessLog(options.log) as log:
        try:
            _train(options, log)
        except (TurnstreamError, PeerLostError) as error:
            log.write("refused", error=repr(error))
            status = 3
    sys.exit(status)


def _train(options: argparse.Namespace, log: ProcessLog) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    token, weights = load_checkpoint(options.folder, from_step=options.from_step)
    with log.waiting("start", deadline_s=options.timeout_s + _SLACK_S):
        stream = BatchStream(
            options.target,
            options.run,
            options.dp_rank,
            options.dp_world_size,
            token,
            session=options.session,
            timeout_s=options.timeout_s,
            max_prefetch_bytes=MAX_PREFETCH_BYTES,
        )
    with stream:
        log.usage = lambda: {
            "held_bytes": stream.statistics().queued_bytes,
            "max_held_bytes": MAX_PREFETCH_BYTES,
        }
        _Rank(options, log, stream, weights).train(token)


class _Rank:
    def __init__(
        self, options: argparse.Namespace, log: ProcessLog, stream: BatchStream, weights: list[str]
    ) -> None:
        self._options = options
        self._log = log
        self._stream = stream
        self._weights = weights
        barrier_s: float | None = options.barrier_s
        self._barrier_s: float = options.timeout_s if barrier_s is None else barrier_s
        self._is_first = options.dp_rank == 0
        self._who = {
            name: getattr(options, name) for name in ("session", "dp_rank", "dp_world_size")
        }

    def train(self, token: str | None) -> None:
        """Train from the step after the token on."""
        after_step = RecoveryToken.parse(token).step if token else 0
        self._write("session", token=token, after_step=after_step)
        if self._is_first:
            self._announce(after_step, jump=self._options.version_jump)
        while (mini_batch := self._next()) is not None:
            self._write("received", **describe(mini_batch))
            time.sleep(self._options.update_s)
            if mini_batch.is_last:
                self._end_step(mini_batch)
                if mini_batch.info.step == self._options.max_steps:
                    break
        self._write("done", weights=self._weights)

    def _write(self, kind: str, **facts: Any) -> None:
        self._log.write(kind, **self._who, **facts)

    def _waiting(self, what: str) -> AbstractContextManager[None]:
        return self._log.waiting(what, deadline_s=self._options.timeout_s + _SLACK_S)

    def _next(self) -> PulledMiniBatch | None:
        with self._waiting("mini_batch"):
            return next(self._stream, None)

    def _end_step(self, mini_batch: PulledMiniBatch) -> None:
        """Acknowledge a step on every rank; only rank 0 logs it."""
        info = mini_batch.info
        self._weights.append(info.manifest_hash)
        self._meet(str(info.step))
        if self._is_first:
            self._write("updated", step=info.step, manifest=info.manifest_hash)
            failpoint("train.after_update")
        with self._waiting("stepped"):
            token = self._stream.stepped()
        if self._is_first:
            self._write("stepped", step=info.step, token=str(token))
            failpoint("train.after_stepped")
            self._announce(info.step)
        if info.step % self._options.checkpoint_every == 0:
            self._save(token)

    def _meet(self, name: str) -> None:
        """Wait until every rank of the session is here."""
        folder = self._options.folder / "meetings" / self._options.session / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(self._options.dp_rank)).touch()
        deadline = time.monotonic() + self._barrier_s
        with self._log.waiting("barrier", deadline_s=self._barrier_s + _SLACK_S):
            while len(list(folder.iterdir())) < self._options.dp_world_size:
                if time.monotonic() > deadline:
                    raise PeerLostError(f"step {name}: a rank did not come")
                time.sleep(_POLL_S)

    def _announce(self, step: int, *, jump: int = 1) -> None:
        version = self._stream.newest_version + jump
        self._write("announcing", version=version, step=step)
        with self._waiting("announce"):
            self._stream.announce_version(version, step=step)
        self._write("announced", version=version, step=step)

    def _save(self, token: RecoveryToken) -> None:
        """Save on rank 0. It commits last, so that the commit counts when it is logged."""
        if not self._is_first:
            self._commit(token)
            self._meet(f"{token.step}-saved")
            return
        path = self._options.folder / f"{token.step:06}.weights"
        _write(path, json.dumps(self._weights))
        failpoint("checkpoint.after_weights")
        _write(path.with_suffix(".token"), str(token))
        self._write("checkpoint", step=token.step, token=str(token))
        failpoint("checkpoint.before_committed")
        self._meet(f"{token.step}-saved")
        self._commit(token)
        self._write("committed", step=token.step, token=str(token))
        failpoint("checkpoint.after_committed")

    def _commit(self, token: RecoveryToken) -> None:
        with self._waiting("committed"):
            self._stream.committed(token)


def load_checkpoint(folder: Path, *, from_step: int = -1) -> tuple[str | None, list[str]]:
    """Return token and weights of a checkpoint, or None and none; one without token is ignored.

    It is the newest one for a negative `from_step`, and the beginning of the run for 0.
    """
    if from_step == 0:
        return str(RecoveryToken(lineage="main", step=0, chain_hash="")), []
    found = sorted(folder.glob("*.token"))
    if from_step > 0:
        found = [path for path in found if int(path.stem) == from_step]
    if not found:
        return None, []
    weights = json.loads(found[-1].with_suffix(".weights").read_text())
    return found[-1].read_text(), weights


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def describe(mini_batch: PulledMiniBatch) -> dict[str, Any]:
    info = mini_batch.info
    return {
        "step": info.step,
        "mini_batch": info.mini_batch,
        "num_mini_batches": info.num_mini_batches,
        "manifest": info.manifest_hash,
        "content": mini_batch.content_hash,
        "denominators": list(info.denominators),
        "num_micro_batches": len(info.micro_batches),
        "num_positions": len(mini_batch.rows),
        "rows": _rows(mini_batch.rows),
    }


def _rows(rows: Rows) -> list[dict[str, Any]]:
    """The real rows; an inert one is only counted."""
    trained = num_trained(rows).tolist()
    return [
        {
            "row": int(rows.row_id[b]),
            "trajectory": rows.trajectory_id[b],
            "sequence": int(rows.sequence_index[b]),
            "name": row_name(
                rows.input_ids[b].tolist(),
                rows.loss_mask[b].tolist(),
                prompt_length=int(rows.prompt_length[b]),
            ),
            "num_trained": trained[b],
            "advantage": float(rows.advantage[b]),
            "reward": float(rows.reward[b]),
        }
        for b in range(len(rows))
        if not rows.is_padding[b]
    ]


if __name__ == "__main__":
    main()
