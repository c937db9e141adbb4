"""What a command shows."""

from __future__ import annotations

import ast
from io import StringIO
from pathlib import Path

from rich.table import Table

import turnstream_server
from turnstream_server.screen import Screen


def test_lines_titles_heads_and_cells_are_shown_as_they_were_written() -> None:
    shown = StringIO()
    words = "a [b] [/c] :ok: [link=x]"
    table = Table(words, title=words)
    table.add_row(words)

    screen = Screen(shown, width=80)
    screen.print(words)
    screen.print(table)

    assert shown.getvalue().count(words) == 4


def test_no_command_has_a_console_of_its_own() -> None:
    made = [
        path.name
        for path in Path(turnstream_server.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Console")
    ]

    assert made == []
