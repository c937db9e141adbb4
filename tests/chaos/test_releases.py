"""Fault 25: services exchanged one by one, or killed all at once, for another release and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.newer import UNKNOWN_FIELD
from harness.rig import PATIENCE_S, Rig, config
from turnstream.store.client import keys

pytestmark = [pytest.mark.e2e, pytest.mark.grpc, pytest.mark.timeout(600)]

StartRig = Callable[..., Rig]
OPEN = "left-1/0/0"
"""Its generator leaves it open after the first turn."""


def test_services_are_upgraded_and_downgraded_one_by_one(rig: Rig) -> None:
    """Takes more than 5 s: a dozen services start one after the other."""
    # A rolling upgrade and downgrade under load: the trainer notices nothing of the batchers'.
    batchers = {name: rig.start_batcher(name) for name in ("batcher", "other")}
    rig.start_ranks(1, checkpoint_every=1)
    _publish_and_train(rig, "first")

    for number, rig.is_newer in enumerate((True, False), 1):
        for name in ("other", "batcher"):
            batchers[name].ask_to_stop()
            batchers[name].wait(PATIENCE_S)
            batchers[name] = rig.start_batcher(name)
            _publish_and_train(rig, f"{name}-{number}")
        assert len(rig.history().sessions) == number
        rig.ranks[0].kill()
        rig.start_ranks(1, checkpoint_every=1)
    rig.server.restart()
    _publish_and_train(rig, "last")

    for stream in _streams(rig):
        assert {is_newer for _, is_newer in stream} == {True, False}
    rig.drain()
    assert rig.counts() == {"accepted": 48, "committed": 48}


def _publish_and_train(rig: Rig, writer: str) -> None:
    stepped = rig.count("stepped")
    rig.start_generator(writer, groups=4)
    rig.wait_for_lines("stepped", stepped + 1)


@pytest.mark.parametrize(
    "is_newer",
    [
        pytest.param(True, id="downgrade"),
        pytest.param(False, id="upgrade", marks=pytest.mark.campaign),
    ],
)
def test_killed_stack_continues_with_another_release_after_a_cold_start(
    start_rig: StartRig, is_newer: bool
) -> None:
    # With an open lease, and plans that the trainer has not seen. Nothing of the ledger changes,
    # and all that the one release wrote is trained by the other.
    rig = start_rig(config=config(takeover_s=600.0))
    rig.is_newer = is_newer
    rig.start_generator("left", groups=4, hang_in=OPEN)
    rig.wait_for_lines("hanging")
    services = [rig.start_batcher(), rig.start_generator(groups=16)]
    services += rig.start_ranks(2, checkpoint_every=2)
    rig.wait_for_lines("committed", 2)
    for service in services:
        service.kill()
    rig.kill_generator("left")
    _wait_for_writes(rig)
    before, streams = rig.counts(), _streams(rig)
    rig.server.kill()

    rig.server.restart()
    rig.is_newer = not is_newer

    assert rig.counts() == before
    assert before["open"] >= 1
    assert _streams(rig) == streams
    assert all(newer == is_newer for stream in streams for _, newer in stream)
    rig.check()
    rig.start_batcher()
    rig.end_leases()
    end = rig.start_helper()
    rig.start_generator("later", groups=4)
    rig.wait(lambda: rig.counts().get("open", 0) == 0, "the rest of the groups")
    end.touch()
    rig.drain(2)
    assert OPEN in {line["trajectory"] for line in rig.history().of("adopted")}
    assert OPEN in rig.trained()


def _wait_for_writes(rig: Rig) -> None:
    """Until what the server held back while its disk synced is in its file."""

    def has_written() -> bool:
        persistence: Any = rig.client.info("persistence")
        return persistence["aof_buffer_length"] == 0

    rig.wait(has_written, "the end of all writes")


def _streams(rig: Rig) -> list[list[tuple[bytes, bool]]]:
    """Return each record of events, plans and turns, and whether the newer release wrote it."""
    names = keys.run_keys(rig.run)
    turns: Any = rig.client.keys("ts:{*/*}:turns")
    found: list[list[tuple[bytes, bool]]] = []
    for streams in ([names.events], [names.plan], sorted(turns)):
        entries: list[Any] = [rig.client.xrange(name) for name in streams]
        records = [record for each in entries for _, own in each for record in own.values()]
        whole = [record for record in records if record.startswith(b"TS")]
        found.append([(record, UNKNOWN_FIELD in record) for record in whole])
    return found
