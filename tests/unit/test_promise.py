"""The page of the promise names tests that exist, and leaves out no promise and no fault."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from harness.faults import FAULTS

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/promise.md"

NUM_FAULTS = 25
PROMISES = ("P1", "P2", "P3", "P4", "P5")
STATES = ("covered", "partly", "not")

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)]*)\)")
_NAMED = re.compile(r"`?(?P<file>[\w/]+\.py)::(?P<test>\w+)`?")
_TEST = re.compile(r"\btest_\w+")


class Named(NamedTuple):
    """A test that the page names.

    Attributes:
        file: as it is written, from `tests/` on.
        test: its function.
        target: of the link.
    """

    file: str
    test: str
    target: str


def named_tests(text: str) -> list[Named]:
    """The tests that a text names.

    >>> named_tests("[`unit/test_a.py::test_b`](../tests/unit/test_a.py)")
    [Named(file='unit/test_a.py', test='test_b', target='../tests/unit/test_a.py')]
    """
    return [
        Named(named["file"], named["test"], link["target"])
        for link in _LINK.finditer(text)
        if (named := _NAMED.fullmatch(link["text"]))
    ]


@cache
def defined_in(path: Path) -> frozenset[str]:
    """The test functions that a file defines; none where there is no such file."""
    if not path.is_file():
        return frozenset()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return frozenset(
        each.name
        for each in body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and each.name.startswith("test_")
    )


@cache
def in_campaign(path: Path) -> frozenset[str]:
    """The test functions of a file that `make campaign` alone runs with all their parameters."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    marks = [each.value for each in body if isinstance(each, ast.Assign) and _is_mark(each)]
    if any("mark.campaign" in ast.unparse(each) for each in marks):
        return defined_in(path)
    functions = [each for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(
        each.name
        for each in functions
        if "pytest.mark.campaign" in map(ast.unparse, each.decorator_list)
    )


def _is_mark(assigned: ast.Assign) -> bool:
    return [ast.unparse(each) for each in assigned.targets] == ["pytestmark"]


def section(title: str) -> str:
    """What stands under the first heading that begins with a title."""
    text = PAGE.read_text(encoding="utf-8")
    (found,) = re.findall(rf"(?ms)^## {re.escape(title)}.*?(?=^## |\Z)", text)
    return found


def rows(text: str) -> Iterator[list[str]]:
    """The cells of the rows of a text's tables, headings left out."""
    for table in re.findall(r"(?m)(?:^\|.*\|\n)+", text):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def items(text: str) -> list[str]:
    """The items of the lists of a text."""
    return re.findall(r"(?ms)^- .*?(?=^- |^\S|^$)", text)


def test_every_named_test_exists_where_its_link_leads() -> None:
    named = named_tests(PAGE.read_text(encoding="utf-8"))

    wrong = [
        each
        for each in named
        if (PAGE.parent / each.target).resolve() != REPOSITORY / "tests" / each.file
        or each.test not in defined_in(REPOSITORY / "tests" / each.file)
    ]
    assert named
    assert wrong == []


def test_every_name_of_a_test_is_a_link_with_its_file() -> None:
    text = PAGE.read_text(encoding="utf-8")
    links = [link["text"] for link in _LINK.finditer(text)]

    assert _TEST.findall(_LINK.sub("", text)) == []
    assert [each for each in links if "test_" in each and not _NAMED.fullmatch(each)] == []


def test_every_sentence_of_a_promise_names_a_test() -> None:
    for promise in PROMISES:
        found = items(section(f"{promise}:"))

        assert found, promise
        assert [item for item in found if not named_tests(item)] == []


def test_every_promise_and_fault_names_a_test_that_make_test_runs() -> None:
    found = [item for promise in PROMISES for item in items(section(f"{promise}:"))]
    found += [row[2] for row in rows(section("The 25 faults"))]

    slow = [
        text
        for text in found
        if (named := named_tests(text))
        and all(each.test in in_campaign(REPOSITORY / "tests" / each.file) for each in named)
    ]

    assert slow == []


def test_every_fault_has_a_row_that_says_what_covers_it() -> None:
    found = list(rows(section("The 25 faults")))

    assert [row[0] for row in found] == [str(number) for number in range(1, NUM_FAULTS + 1)]
    for number, fault, tests, said in found:
        state = re.split(r"[,:]", said)[0]
        assert fault, number
        assert state in STATES, number
        assert bool(named_tests(tests)) == (state != "not"), number


def test_every_fault_of_the_long_run_has_its_counts() -> None:
    counted = {row[0].strip("`"): row[1:3] for row in rows(section("A run of"))}

    assert set(counted) == {fault.__name__ for fault in FAULTS}
    for fault, (injected, survived) in counted.items():
        assert 0 <= int(survived) <= int(injected), fault
