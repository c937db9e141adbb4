"""Random faults over a running stack, and random damage to all that is sent."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fuzz.services import ServiceCampaign
from harness.soak import MAX_STORE_BYTES, MODES, soak
from turnstream_server import failpoints
from turnstream_server.embedded import Durability

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SEED = 521
"""It draws a kill of the store, a kill of a batcher, and a power cut of the store."""

NUM_FAULTS = 3
TESTS = Path(__file__).parents[1]


@pytest.mark.campaign
@pytest.mark.parametrize("durability", MODES)
def test_run_survives_random_faults(tmp_path: Path, durability: Durability) -> None:
    report = soak(tmp_path, seed=SEED, durability=durability, num_faults=NUM_FAULTS)

    survived = sum(map(len, report.recoveries_s.values()))
    assert survived + report.in_vain.total() == NUM_FAULTS
    for name in ("kill_the_store", "cut_the_stores_power"):
        assert len(report.recoveries_s[name]) == 1
    assert report.facts["cuts"] == (2 if durability == "everysec" else 0)
    assert 0 < report.most_store_bytes < MAX_STORE_BYTES
    states = {"committed", "abandoned", "surplus", "incomplete"}
    assert report.facts["ledger"].keys() <= {"accepted", *states}


def test_every_failpoint_of_the_product_is_in_a_test() -> None:
    files = {path: path.read_text() for path in TESTS.rglob("test_*.py")}
    words = {path: _words(text) for path, text in files.items() if path.parent.name != "failpoints"}

    missing = failpoints.NAMES.difference(*words.values())

    # Some tests build the name from a script that they give in quotes.
    ends = ('{act}.before"', '{script}.{place}"')
    built = {path for path in words if any(end in files[path] for end in ends)}
    scripts = set[str]().union(*(words[path] for path in built))
    assert {name for name in missing if name.partition(".")[0] not in scripts} == set()


def _words(text: str) -> set[str]:
    """Return the strings of a module, without the options of a failpoint, and no comments."""
    nodes = ast.walk(ast.parse(text))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return {re.sub(r"(@\d+)?(=stop)?$", "", each) for each in strings if isinstance(each, str)}


@pytest.mark.campaign
def test_services_refuse_damaged_requests_keys_and_bodies(tmp_path: Path) -> None:
    with ServiceCampaign(tmp_path, seed=20_261_126) as campaign:
        report = campaign.run(400)

    assert report.problems == []
    assert report.num_cases == 400
