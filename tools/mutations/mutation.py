"""One mutation."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One change of one file of the SDK that takes a guard away.

    Attributes:
        name: the resulting fault, in words.
        file: in the package.
        before: a text that is in the file exactly once.
        after: its replacement.
        tests: names of the test files that should notice; they are tried first.
        package: of `turnstream`; its tests are in the folder of that name.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    package: str = "batching"

    @property
    def path(self) -> str:
        """Path of the file in `turnstream`."""
        return f"{self.package}/{self.file}"
