"""What one mutation is."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One change of one file of `turnstream.batching` that takes a guard away.

    Attributes:
        name: what goes wrong then, in words.
        file: in `turnstream/batching`.
        before: a text that is in the file exactly once.
        after: what stands there instead.
        tests: names of the test files that should notice; they are tried first.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
