"""Links between the documents lead to files and headings that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]

_LINK = re.compile(r"\]\((?!\w+:)(?P<file>[^)#\s]*)#?(?P<heading>[^)\s]*)\)")


def links(page: Path) -> list[tuple[Path, str]]:
    """Return (file, heading) of every link of a page that leads into the repository."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    return [
        (page.parent / link["file"] if link["file"] else page, link["heading"])
        for link in _LINK.finditer(text)
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
