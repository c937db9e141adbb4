"""Send thousands of damaged requests, print a summary, and fail after any violation."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from fuzz.services import Report, ServiceCampaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for data and logs, which is kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with ServiceCampaign(folder, seed=options.seed) as campaign:
            report = campaign.run(options.cases)
    _show(report, seed=options.seed)
    return 1 if report.problems else 0


def _show(report: Report, *, seed: int) -> None:
    print(f"{report.num_cases} cases of seed {seed}")
    for outcome, number in sorted(report.outcomes.items()):
        print(f"  {number:5d}  {outcome}")
    for name, peak in report.peak_bytes.items():
        print(f"the {name} took at most {peak / 1e6:.0f} MB")
    for name, growth in report.growth_bytes.items():
        print(f"the {name} grew by {growth / 1e6:.1f} MB after the first quarter")
    for problem in report.problems:
        print(f"PROBLEM {problem}")
    print(f"{len(report.problems)} problems")


sys.exit(main())
