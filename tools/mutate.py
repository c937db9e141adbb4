"""Break the guards of the batching core and of the losses, and print which test notices each.

    python tools/mutate.py                    all of `mutations`, some minutes
    python tools/mutate.py --file sft.py      those of one file: its name or batching/layouts/sft.py
    python tools/mutate.py --only WORDS       those whose name contains the words
    python tools/mutate.py --list             their names, without trying them

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
from collections.abc import Iterable, Sequence
from pathlib import Path

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parent.parent
SDK = Path("clients/python/src")
TESTS = Path("tests/unit")
PACKAGES = sorted({mutation.package for mutation in MUTATIONS})
COPIED = (
    SDK,
    *[TESTS / package for package in PACKAGES],
    Path("tests/conftest.py"),
    Path("tests/testkit"),
    Path("docs/api.md"),
    Path("pyproject.toml"),
)


def main() -> int:
    """Try the mutations asked for; 0 if a test caught every one."""
    asked = arguments()
    chosen = [mutation for mutation in MUTATIONS if is_chosen(mutation, asked)]
    if not chosen:
        print("no mutation is named so")
        return 1
    if asked.list:
        print("\n".join(f"{mutation.path}: {mutation.name}" for mutation in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Path(folder)
        copy_sources(copy)
        stale = [mutation for mutation in chosen if not is_in_source(mutation, copy)]
        for mutation in stale:
            print(f"{mutation.name}: not exactly once in {mutation.path}: {mutation.before!r}")
        if failing := first_failing(copy, own_tests(chosen)):
            print(f"unchanged, the core fails already: {failing}")
            return 1
        current = [mutation for mutation in chosen if mutation not in stale]
        num_survived = sum([not report(mutation, copy) for mutation in current])
    print(f"{len(current)} mutations, {num_survived} survived, {len(stale)} out of date")
    return int(bool(num_survived or stale))


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="part of a mutation's name")
    parser.add_argument("--file", default="", metavar="FILE", help="the source file, or its path")
    parser.add_argument("--list", action="store_true", help="only print what would be tried")
    return parser.parse_args()


def is_chosen(mutation: Mutation, asked: argparse.Namespace) -> bool:
    """Whether it is one of those asked for."""
    return asked.only in mutation.name and asked.file in ("", mutation.file, mutation.path)


def copy_sources(into: Path) -> None:
    """Copy the files that the tests need."""
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
    return source_of(mutation, copy).read_text().count(mutation.before) == 1


def source_of(mutation: Mutation, copy: Path) -> Path:
    """The file that it breaks, in the copy."""
    return copy / SDK / "turnstream" / mutation.path


def report(mutation: Mutation, copy: Path) -> bool:
    """Print the test that catches it, and say whether one did."""
    path = source_of(mutation, copy)
    source = path.read_text()
    change(path, source.replace(mutation.before, mutation.after))
    own = own_tests([mutation])
    others = [test for test in every_test(mutation.package) if test not in own]
    try:
        caught_by = first_failing(copy, own)
        caught_by_another = None if caught_by else first_failing(copy, others)
    finally:
        change(path, source)
    if caught_by_another and not first_failing(copy, others):  # not a test that always fails
        caught_by = caught_by_another
    print(f"{mutation.name}\n    {mutation.path}: {caught_by or 'SURVIVED'}", flush=True)
    return caught_by is not None


def change(path: Path, source: str) -> None:
    """Write a file with a time one second later: otherwise Python keeps its compiled code."""
    later = path.stat().st_mtime + 1
    path.write_text(source)
    os.utime(path, (later, later))


def own_tests(mutations: Iterable[Mutation]) -> list[Path]:
    """The test files that should notice them."""
    names = {TESTS / m.package / f"{name}.py" for m in mutations for name in m.tests}
    return sorted(names)


def every_test(package: str) -> list[Path]:
    """All test files of a package."""
    found = (ROOT / TESTS / package).glob("test_*.py")
    return sorted(path.relative_to(ROOT) for path in found)


def first_failing(copy: Path, tests: Sequence[Path]) -> str | None:
    """The first test of these files that fails on the copy; None if all pass.

    Raises:
        RuntimeError: pytest could not run them: the mutation is no Python, or not importable.
    """
    options = ["-x", "-q", "--tb=no", "-rf", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, tests)],
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
    """Return the environment of a test run that imports the copy and stops at any example."""
    return {**os.environ, "PYTHONPATH": str(copy / SDK), "HYPOTHESIS_PROFILE": "any"}


if __name__ == "__main__":
    sys.exit(main())
