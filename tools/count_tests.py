"""Print one line with the counts of a test run, from the JUnit XML report of pytest.

python tools/count_tests.py REPORT
6,631 passed, 970 skipped (969: no redis-server is installed, 1: no CUDA device)
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


def main() -> None:
    """Print the counts, or that there is no report."""
    try:
        report = ElementTree.parse(Path(sys.argv[1]))
    except (OSError, ElementTree.ParseError):
        print("no test ran: pytest wrote no report")
    else:
        print(counts(report))


def counts(report: ElementTree.ElementTree[ElementTree.Element]) -> str:
    """Return the number of tests by outcome, and of skipped tests by reason, largest first."""
    suites = list(report.iter("testsuite"))
    number = {
        name: sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    }
    passed = number["tests"] - number["failures"] - number["errors"] - number["skipped"]
    outcomes = {"failed": number["failures"], "errors": number["errors"], "passed": passed}
    shown = [f"{count:,} {name}" for name, count in outcomes.items() if count or name == "passed"]
    reasons = Counter(skipped.get("message", "no reason") for skipped in report.iter("skipped"))
    listed = ", ".join(f"{count:,}: {reason}" for reason, count in reasons.most_common())
    skipped = f"{number['skipped']:,} skipped"
    return ", ".join([*shown, f"{skipped} ({listed})" if listed else skipped])


if __name__ == "__main__":
    main()
