"""Ways to break a guard of the scripts or of the code, for as long as a context lasts."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

from simulator.fates import fate
from simulator.lua import Scripts
from simulator.store import SCRIPTS

Break = Callable[[], contextlib.AbstractContextManager[Any]]


class Guard(NamedTuple):
    """A guard and the edit that breaks it.

    Attributes:
        needs: attribute of `Fate` that a run needs to show it, such as `has_reviser`; "" for any
            run.
    """

    name: str
    broken: Break
    needs: str = ""

    def lives_of(self, seeds: range) -> list[int]:
        """Those of the seeds whose lives may show that it is broken."""
        if not self.needs:
            return [*seeds]
        return [seed for seed in seeds if getattr(fate(random.Random(seed)), self.needs)]


@contextlib.contextmanager
def edited(old: str, new: str) -> Iterator[None]:
    """Within, every script in which `old` stands has `new` in its place."""
    load = Scripts.load
    num_edited = 0

    def load_edited(scripts: Scripts, source: bytes) -> bytes:
        nonlocal num_edited
        text = source.replace(old.encode(), new.encode())
        if text == source:
            return load(scripts, source)
        num_edited += 1
        sha = load(scripts, text)
        own = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        scripts.by_sha[own] = scripts.by_sha[sha]
        return own

    before = dict(SCRIPTS.by_sha)
    SCRIPTS.by_sha.clear()
    try:
        with patch.object(Scripts, "load", load_edited):
            yield
    finally:
        SCRIPTS.by_sha.clear()
        SCRIPTS.by_sha.update(before)
    if not num_edited:
        raise AssertionError(f"no script that was used has {old!r}")


def script(old: str, new: str) -> Break:
    """A break of the scripts."""
    return lambda: edited(old, new)


def method(owner: type[Any], name: str, new: Any) -> Break:
    """A break of the code."""
    return lambda: patch.object(owner, name, new)
