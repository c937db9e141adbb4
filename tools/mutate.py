"""Break the guards of the batching core one by one, and print which test notices each.

    python tools/mutate.py                  all of `mutations.py`, some minutes
    python tools/mutate.py --only WORDS     those whose name contains the words

The breaking is done in a temporary copy, never in the tree. Ends with 1 if nothing noticed a
mutation, or if its text is no longer in the source exactly once: then it tests nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parent.parent
SDK = Path("clients/python/src")
CORE = SDK / "turnstream/batching"
TESTS = Path("tests/unit/batching")
COPIED = (SDK, TESTS, Path("tests/conftest.py"), Path("pyproject.toml"))


def main() -> int:
    """Try the mutations asked for; 0 if a test caught every one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="part of a mutation's name")
    words = parser.parse_args().only
    chosen = [mutation for mutation in MUTATIONS if words in mutation.name]
    if not chosen:
        print(f"no mutation is named {words!r}")
        return 1
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Path(folder)
        copy_sources(copy)
        stale = [mutation for mutation in chosen if not is_in_source(mutation, copy)]
        for mutation in stale:
            print(f"{mutation.name}: not exactly once in {mutation.file}: {mutation.before!r}")
        if failing := first_failing(copy, every_test()):
            print(f"unchanged, the core fails already: {failing}")
            return 1
        current = [mutation for mutation in chosen if mutation not in stale]
        num_survived = sum([not report(mutation, copy) for mutation in current])
    print(f"{len(current)} mutations, {num_survived} survived, {len(stale)} out of date")
    return int(bool(num_survived or stale))


def copy_sources(into: Path) -> None:
    """What the batching tests need, without compiled code: a change within a second would hide."""
    ignore = shutil.ignore_patterns("__pycache__")
    for path in COPIED:
        target = into / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, target, ignore=ignore)
        else:
            shutil.copyfile(ROOT / path, target)


def is_in_source(mutation: Mutation, copy: Path) -> bool:
    """Whether the text to break is there once, so that it is clear what was broken."""
    return (copy / CORE / mutation.file).read_text().count(mutation.before) == 1


def report(mutation: Mutation, copy: Path) -> bool:
    """Print the test that catches it, and say whether one did."""
    path = copy / CORE / mutation.file
    source = path.read_text()
    path.write_text(source.replace(mutation.before, mutation.after))
    try:
        caught_by = first_failing(copy, mutation.tests) or first_failing(copy, every_test())
    finally:
        path.write_text(source)
    print(f"{mutation.name}\n    {mutation.file}: {caught_by or 'SURVIVED'}", flush=True)
    return caught_by is not None


def every_test() -> list[str]:
    """The names of all test files of the core."""
    return sorted(path.stem for path in (ROOT / TESTS).glob("test_*.py"))


def first_failing(copy: Path, tests: Sequence[str]) -> str | None:
    """The first test of these files that fails on the copy; None if all pass.

    Raises:
        RuntimeError: pytest could not run them: the mutation is no Python, or not importable.
    """
    options = ["-x", "-q", "--tb=no", "-rf", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    files = [str(TESTS / f"{name}.py") for name in tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=copy,
        env=environment(copy),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    failed = re.search(r"^FAILED \S*?([^/\s]+\.py::\w+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or failed is None:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return failed[1]


def environment(copy: Path) -> dict[str, str]:
    """Of a run that imports the copy, and searches as long as at a desk."""
    kept = {name: value for name, value in os.environ.items() if name != "CI"}
    return {**kept, "PYTHONPATH": str(copy / SDK), "PYTHONDONTWRITEBYTECODE": "1"}


if __name__ == "__main__":
    sys.exit(main())
