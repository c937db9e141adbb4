"""Faults of what the store keeps: torn, damaged, or gone as a whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.rig import CONFIG, PATIENCE_S, Rig
from testkit import ids
from testkit.services.processes import frozen
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.run.runs import create_run

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(600)]


def test_torn_end_of_the_file_is_dropped_and_sent_again(rig: Rig) -> None:
    # Fault 8: a crash in the middle of a write. The store had acknowledged it, and comes back
    # without; the writer does nothing but live.
    turns = keys.trajectory_keys(rig.run, "g/0/0").turns
    with Publisher(rig.server.url, rig.run, writer="w", keep_s=60) as publisher:
        trajectory = publisher.trajectory("g", 0, num_samples=1)
        trajectory.append(ids("ab"), ids("CD")).result(10)
        with frozen(rig.server.pid):
            receipt = trajectory.append(ids("abCD"), ids("E"))
        receipt.result(10)
        before: Any = rig.client.xrange(turns)
        path = _append_only_file(rig)
        rig.wait(lambda: before[-1][1][b"r"] in path.read_bytes(), "the turn in the file")
        rig.server.kill()
        whole = path.read_bytes()
        path.write_bytes(whole[: whole.rindex(b"XADD")])
        rig.server.restart()
        rig.wait(lambda: publisher.statistics().num_resent, "turns that are sent again")
        after: Any = rig.client.xrange(turns)
        trajectory.append(ids("abCDE"), ids("F")).result(10)

    assert len(before) == 2
    assert after == before
    assert b"Truncat" in (rig.server.data_dir / "server.log").read_bytes()


def _append_only_file(rig: Rig) -> Path:
    (path,) = rig.server.data_dir.glob("appendonlydir/*.incr.aof")
    return path


def test_empty_server_is_noticed_and_never_restarts_at_0(rig: Rig) -> None:
    # Fault 10: the data set is gone, the address is the same.
    batcher = rig.start_batcher()
    rig.start_generator(groups=40, pause_s=0.05, timeout_s=5)
    rig.start_ranks(1, checkpoint_every=1)
    rig.wait_for_lines("committed", 2)
    rig.loses_history = True
    rig.server.kill()
    shutil.rmtree(rig.server.data_dir / "appendonlydir")
    rig.server.restart()

    rig.ranks[0].wait(PATIENCE_S)
    lost = _error_of_rank(rig, "session-001")
    rig.wait_for_lines("ended", 2)

    assert rig.ranks[0].status == 3
    stepped, committed = (_newest(rig, kind) for kind in ("stepped", "committed"))
    assert f"had stepped to {stepped} and committed {committed}" in lost
    assert "StoreBehindError(\"the store has lost run 'chaos'" in lost
    assert batcher.status is None
    (ahead,) = rig.start_ranks(1)  # from its checkpoint
    ahead.wait(PATIENCE_S)
    assert ahead.status == 3
    assert "StoreBehindError" in _error_of_rank(rig, "session-002")
    create_run(rig.client, rig.run, CONFIG)  # as an operator would
    (ahead,) = rig.start_ranks(1)
    ahead.wait(PATIENCE_S)
    assert ahead.status == 3
    assert "StoreBehindError" in _error_of_rank(rig, "session-003")
    assert rig.ledger().accepted == 0
    assert rig.planned() == 0
    rig.join(rig.start_generator("new", groups=4))
    rig.wait(lambda: rig.planned() == 1, "the first plan of the new store")
    assert batcher.status is None


def _error_of_rank(rig: Rig, session: str) -> str:
    refused = rig.history().of("refused")
    (error,) = [line["error"] for line in refused if line.process == f"{session}-rank-0"]
    return error


def _newest(rig: Rig, kind: str) -> int:
    return max(line["step"] for line in rig.history().of(kind))
