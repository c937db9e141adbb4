"""Print the releases of this environment as the lines of constraints.txt: `make constraints`."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from typing import Final

_OURS: Final = {"turnstream", "turnstream-server"}
_OF_TORCH: Final = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
"""torch comes from an index of its own, and brings the packages of its build."""


def pins(installed: dict[str, str]) -> list[str]:
    """Return a line for each package, sorted.

    >>> pins({"Zope": "2", "numpy": "2.4", "torch": "2.13.0+cpu", "nvidia-nccl-cu13": "2.27"})
    ['numpy==2.4', 'zope==2']
    """
    named = {re.sub(r"[-_.]+", "-", name).lower(): each for name, each in installed.items()}
    return [
        f"{name}=={version}"
        for name, version in sorted(named.items())
        if name not in _OURS and not _OF_TORCH.fullmatch(name)
    ]


if __name__ == "__main__":
    found = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    sys.stdout.write("# Written by `make constraints`. torch is not here: see the Makefile.\n")
    sys.stdout.write("".join(f"{line}\n" for line in pins(found)))
