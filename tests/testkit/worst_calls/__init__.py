"""The most expensive accepted call of each script, against a store at its accepted limits.

Each script has an entry in one of the modules: a builder, decorated with `worst`, which fills the
store and returns the calls; or a line in CONSTANT that says why nothing can make it expensive.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from testkit.runs.scripts import script_files
from testkit.worst_calls import generators, leaders, services
from testkit.worst_calls.store import Build

WORST: Final[Mapping[str, Build]] = {
    **generators.WORST,
    **leaders.WORST,
    **services.WORST,
}
"""Script to the builder of its most expensive calls."""

CONSTANT: Final[Mapping[str, str]] = {
    **generators.CONSTANT,
    **leaders.CONSTANT,
    **services.CONSTANT,
}
"""Script to the reason why its cost does not depend on its input or on the state."""

_INCLUDE: Final = re.compile(r"^-- include: (?:[\w.]+/)?(\w+)\.lua$", re.MULTILINE)
_LOOP: Final = re.compile(r"^\s*(?:for|while|repeat)\b|'(?:HGETALL|HKEYS|HVALS)'", re.MULTILINE)


def script_names() -> set[str]:
    """Return the names of all scripts, without the parts that others include."""
    files = script_files()
    parts = {name for path in files.values() for name in _INCLUDE.findall(path.read_text())}
    return {*files} - parts


def has_loop(name: str) -> bool:
    """Return whether the text of a script has a loop, or reads a whole hash."""
    return _LOOP.search(script_files()[name].read_text()) is not None
