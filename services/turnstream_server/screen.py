"""The console of a command, which shows text from users without markup, and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

_SEEN: Final = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Characters that a terminal would obey, and what is shown in their place."""


_YEAR_10000_MS: Final = 253_402_300_800_000


class Screen(Console):
    """A console that shows every text as it was written, in lines, tables and titles alike.

    Names, tags, reasons and exceptions come from users: "[/INST]" and ":ok:" stand for themselves
    and an escape sequence does nothing. Colours belong to styles.

    Args:
        file: where it is shown; None: the standard output.
        width: in columns; None: those of the terminal.
    """

    def __init__(self, file: IO[str] | None = None, *, width: int | None = None) -> None:
        super().__init__(file=file, width=width, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text of a line, a title or a cell."""
        return super().render_str(visible(text), **options)


def visible(text: str) -> str:
    r"""Return the text with a picture in the place of each character that a terminal would obey.

    >>> visible("tool [bash]\tfailed: \x1b[2J")
    'tool [bash]\tfailed: ␛[2J'
    """
    return text.translate(_SEEN)


def cell_text(value: object) -> str:
    """Return the text of a value.

    >>> [cell_text(each) for each in (20_000, 0.25, None, "open")]
    ['20,000', '0.25', '', 'open']
    """
    match value:
        case None:
            return ""
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def time_text(ms: int) -> str:
    """Return a time in UTC as text; as a number if it is after the year 9999.

    >>> time_text(1_700_000_000_123)
    '2023-11-14 22:13:20+00:00'
    """
    if ms >= _YEAR_10000_MS:
        return f"{ms} ms"
    return datetime.fromtimestamp(ms / 1_000, UTC).isoformat(sep=" ", timespec="seconds")


def make_table(columns: Sequence[str], rows: Iterable[Sequence[object]], **options: Any) -> Table:
    """Return a table of these values; `options` are those of rich."""
    table = Table(*columns, **options)
    for row in rows:
        table.add_row(*map(cell_text, row))
    return table


def facts_table(rows: Iterable[tuple[str, str]] = ()) -> Table:
    """Return a table of names and values, without borders."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def print_figures(figures: Mapping[str, Any] | None, console: Console) -> None:
    """Print a table of metrics and one of tags, as returned by `shown_figures`."""
    if figures is None:
        return
    if figures["metrics"]:
        columns = ("num_trajectories", "mean", "minimum", "maximum")
        rows = [
            (name, *(each[column] for column in columns))
            for name, each in figures["metrics"].items()
        ]
        console.print(make_table(("metric", "trajectories", "mean", "minimum", "maximum"), rows))
    if figures["tags"]:
        rows = [
            (name, text, each["num_trajectories"], each["reward_mean"])
            for name, tag in figures["tags"].items()
            for text, each in {**tag["values"], "(any other value)": tag["other"]}.items()
            if each is not None
        ]
        console.print(make_table(("tag", "value", "trajectories", "mean reward"), rows))
    if figures["num_left_out"]:
        console.print(f"{figures['num_left_out']:,} tags and metrics are not shown")
