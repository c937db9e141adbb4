"""Random faults, one after the other, over one running stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.soak import MAX_STORE_BYTES, MODES, soak
from turnstream_server import failpoints
from turnstream_server.embedded import Durability

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

SEED = 17803
NUM_FAULTS = 3
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("durability", MODES)
def test_run_survives_random_faults(tmp_path: Path, durability: Durability) -> None:
    report = soak(tmp_path, seed=SEED, durability=durability, num_faults=NUM_FAULTS)

    survived = sum(map(len, report.recoveries_s.values()))
    assert survived + report.in_vain.total() == NUM_FAULTS
    assert 0 < report.most_store_bytes < MAX_STORE_BYTES
    states = {"committed", "abandoned", "surplus", "incomplete"}
    assert report.facts["ledger"].keys() <= {"accepted", *states}


def test_every_failpoint_of_the_product_is_in_a_test() -> None:
    files = [path.read_text() for path in TESTS.rglob("test_*.py")]

    missing = {name for name in failpoints.NAMES if not any(name in text for text in files)}

    # Some tests build the name from a script that they give in quotes.
    built = [text for text in files if '{act}.before"' in text or '{script}.{place}"' in text]
    scripts = {name: f'"{name.partition(".")[0]}"' for name in missing}
    assert {name for name in missing if not any(scripts[name] in text for text in built)} == set()
