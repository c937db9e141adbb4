"""The version of the requests between the SDK and a gateway, which both import from here."""

from __future__ import annotations

from typing import Final

HEADER: Final = "Turnstream-Wire"
"""Header of each request of the SDK, with the version of the request.

The answer has the highest version that the gateway knows in the same header. A request without the
header is accepted: other programs need none.
"""

WIRE_VERSION: Final = 1
"""The version of this release. A change that an older gateway or SDK would misread raises it."""

PROBLEM: Final = "wire-version"
"""Type of the problem document of a version that the gateway does not know."""


def refused_version(text: str | None) -> str:
    """Return why a gateway refuses the version in a header; "" where it accepts it.

    >>> refused_version("1"), refused_version(None)
    ('', '')
    >>> refused_version("7")
    "Turnstream-Wire is '7', and this gateway knows 1: install the same release on both sides"
    """
    if text is None or (text.isascii() and text.isdecimal() and 1 <= int(text) <= WIRE_VERSION):
        return ""
    known = f"{WIRE_VERSION}" if WIRE_VERSION == 1 else f"1 to {WIRE_VERSION}"
    return (
        f"{HEADER} is {text[:20]!r}, and this gateway knows {known}: install the same release on "
        "both sides"
    )
