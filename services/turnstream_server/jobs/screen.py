"""The screen of a command: whatever comes from users is text on it, never markup."""

from __future__ import annotations

from typing import IO, Any, Final

from rich.console import Console
from rich.text import Text

_SEEN: Final = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Characters that a terminal would obey, and what is shown in their place."""


class Screen(Console):
    """A console that shows every text as it was written, in lines, tables and titles alike.

    Names, tags, reasons and exceptions are anybody's: "[/INST]" and ":ok:" stand for themselves
    and an escape sequence does nothing. Colours belong to styles.

    Args:
        file: where it is shown; None: the standard output.
        width: in columns; None: those of the terminal.
    """

    def __init__(self, file: IO[str] | None = None, *, width: int | None = None) -> None:
        super().__init__(file=file, width=width, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text that a line, a title or a cell of a table shows."""
        return super().render_str(visible(text), **options)


def visible(text: str) -> str:
    r"""The text, with a picture in the place of each character that a terminal would obey.

    >>> visible("tool [bash]\tfailed: \x1b[2J")
    'tool [bash]\tfailed: ␛[2J'
    """
    return text.translate(_SEEN)
