"""Links between documents lead somewhere, and the page of the promise names tests that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/promise.md"
NUM_FAULTS = 25
SECTIONS = ("P1:", "P2:", "P3:", "P4:", "P5:", "Hosted models", "Several tenants")

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)]*)\)")
_TEST = re.compile(r"\btest_\w+")


class Named(NamedTuple):
    """A test that the page names.

    Attributes:
        test: name of its function.
        target: file to which the link leads, relative to the page.
    """

    test: str
    target: str

    @property
    def path(self) -> Path:
        """The file to which the link leads."""
        return (PAGE.parent / self.target).resolve()


def named_tests(text: str) -> list[Named]:
    """The tests that a text names.

    >>> named_tests("[test_b](../tests/unit/test_a.py), [a page](page.md)")
    [Named(test='test_b', target='../tests/unit/test_a.py')]
    """
    links = _LINK.finditer(text)
    return [Named(each["text"], each["target"]) for each in links if _TEST.fullmatch(each["text"])]


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


def runs_in_make_test(text: str) -> bool:
    """Return whether a text names a test that does not need `make campaign`."""
    return any(each.test not in in_campaign(each.path) for each in named_tests(text))


def section(title: str) -> str:
    """Return the text under the only heading that begins with a title."""
    text = PAGE.read_text(encoding="utf-8")
    (found,) = re.findall(rf"(?ms)^## {re.escape(title)}.*?(?=^## |\Z)", text)
    return found


def rows(text: str) -> Iterator[list[str]]:
    """The cells of the rows of a text's tables, headings left out."""
    for table in re.findall(r"(?m)(?:^\|.*\|\n)+", text):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_every_named_test_exists_where_its_link_leads() -> None:
    named = named_tests(PAGE.read_text(encoding="utf-8"))

    wrong = [
        each
        for each in named
        if not each.path.is_relative_to(REPOSITORY / "tests")
        or each.test not in defined_in(each.path)
    ]
    assert named
    assert wrong == []


def test_every_promise_and_fault_names_a_test_that_make_test_runs() -> None:
    for title in (*SECTIONS, "Faults"):
        found = list(rows(section(title)))

        assert found, title
        assert [row for row in found if not all(row)] == [], title
        assert [row for row in found if not runs_in_make_test(row[-1])] == [], title


def test_every_fault_has_a_row_with_its_result() -> None:
    found = list(rows(section("Faults")))

    assert [row[0] for row in found] == [str(number) for number in range(1, NUM_FAULTS + 1)]
    assert {len(row) for row in found} == {4}


PAGES = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]

_FILE_LINK = re.compile(r"\]\((?!\w+:)(?P<file>[^)#\s]*)#?(?P<heading>[^)\s]*)\)")


def links(page: Path) -> list[tuple[Path, str]]:
    """Return (file, heading) of every link of a page that leads into the repository."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    return [
        (page.parent / link["file"] if link["file"] else page, link["heading"])
        for link in _FILE_LINK.finditer(text)
    ]


@cache
def headings(page: Path) -> frozenset[str]:
    """Return the names of the headings of a page, as links spell them."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    found = re.findall(r"(?m)^#+ (.+)$", text)
    return frozenset(re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in found)


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    found = [(page.name, *link) for page in PAGES for link in links(page)]

    broken = [
        (page, file, heading)
        for page, file, heading in found
        if not file.exists() or (heading and heading not in headings(file.resolve()))
    ]

    assert len(found) >= len(PAGES)
    assert broken == []
