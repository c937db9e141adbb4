"""Write the tables of settings into docs/settings.md, from the class `BatchingConfig`.

    .venv/bin/python tools/settings_page.py

A table stands between `<!-- settings from NAME -->` and `<!-- end of settings -->`. It has the
settings from that one to the one before the next table, in the order of the class.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.rules import FIXED

PAGE = Path(__file__).parents[1] / "docs/settings.md"
BLOCK = re.compile(r"(<!-- settings from (\w+) -->\n).*?(<!-- end of settings -->)", re.DOTALL)
NAMES: Final = tuple(field.name for field in dataclasses.fields(BatchingConfig))
_HINTS: Final = get_type_hints(BatchingConfig, include_extras=True)
_HEAD: Final = "| Setting | Type | Default | Values | Meaning |\n|---|---|---|---|---|"
_TYPES: Final = {int: "whole number", float: "number", bool: "bool", str: "text"}


def written(page: str) -> str:
    """Return the page with the tables of today's class; each begins where its comment says."""
    firsts = [found[2] for found in BLOCK.finditer(page)]
    ends = dict(zip(firsts, [*firsts[1:], None], strict=True))

    def block(found: re.Match[str]) -> str:
        end = ends[found[2]]
        names = NAMES[NAMES.index(found[2]) : NAMES.index(end) if end else None]
        return "\n".join([f"{found[1]}{_HEAD}", *map(row, names), found[3]])

    return BLOCK.sub(block, page)


def row(name: str) -> str:
    """Return the row of a setting.

    >>> row("batch_groups")
    '| `batch_groups` | whole number | required | at least 1 | groups of one training step. |'
    """
    kind, values = _kind(_HINTS[name])
    return f"| `{name}` | {kind} | {_default(name)} | {values} | {_meaning(name)} |"


def meanings() -> dict[str, str]:
    """Return the text of each setting in the docstring of the class."""
    text = inspect.getdoc(BatchingConfig) or ""
    attributes = text.partition("Attributes:\n")[2].partition("\nRaises:")[0]
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", attributes, re.DOTALL | re.MULTILINE)
    return {name: " ".join(sentences.split()) for name, sentences in found}


def _meaning(name: str) -> str:
    reason = f" It cannot be revised: {FIXED[name]}." if name in FIXED else ""
    return (meanings()[name] + reason).replace("|", r"\|")


def _kind(hint: Any) -> tuple[str, str]:
    """Return type and accepted values, in words."""
    arguments: tuple[Any, ...] = get_args(hint)
    if get_origin(hint) is Literal:
        return "choice", ", ".join(f'`"{choice}"`' for choice in arguments)
    if get_origin(hint) is Annotated:
        kind, (least, most) = arguments
        end = "at least {:.12g}" if most == math.inf else "{:.12g} to {:.12g}"
        return _TYPES[kind], end.format(least, most)
    return _TYPES.get(hint, "list"), ""


def _default(name: str) -> str:
    default = BatchingConfig.__dataclass_fields__[name].default
    if default is not dataclasses.MISSING:
        return f"`{default!r}`".replace("'", '"').replace("()", "[]")
    return "`batch_groups`" if name == "mini_batch_groups" else "required"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
