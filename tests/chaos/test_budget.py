"""A trainer that is too slow for its generators: they wait, within the budget; nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.rig import Rig, config
from turnstream_server.bus.queries.ledger import read_budget

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

StartRig = Callable[..., Rig]
MAX_BYTES = 400_000  # some nine steps of this run


def test_producers_of_a_slow_trainer_wait_within_the_budget(
    start_rig: StartRig,
) -> None:
    rig = start_rig(config=config(max_staleness=1000, retain_checkpoints=1, max_bytes=MAX_BYTES))
    rig.start_batcher()
    for number in range(2):
        rig.start_generator(f"w{number}", groups=60)
    looks: list[int] = []

    def look() -> None:
        looks.append(read_budget(rig.client, rig.run).held)

    rig.wait(lambda: look() or num_waits(rig) > 0, "producers that wait")
    (slow,) = rig.start_ranks(1, checkpoint_every=1, update_s=0.1)
    rig.wait(lambda: look() or rig.count("committed") >= 5, "a trainer that goes on")
    slow.kill()
    rig.drain()

    assert MAX_BYTES / 2 < max(looks) <= MAX_BYTES
    assert rig.counts() == {"accepted": 240, "committed": 240}


def num_waits(rig: Rig) -> int:
    """How often a generator was told to wait."""
    return sum(line.facts["waits"] for line in rig.history().of("alive"))
