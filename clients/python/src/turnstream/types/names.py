"""Names of runs and groups in the form in which they are part of keys and ids."""

from __future__ import annotations

import functools
import re
import urllib.parse

MAX_NAME_LENGTH = 512
"""Of an encoded run or group name: a ledger field is kept in memory for every trajectory."""

_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,128}")


@functools.lru_cache(maxsize=4096)
def encode_name(name: str) -> str:
    """The form of a run or group name that is safe inside a key.

    >>> encode_name("gsm8k-17"), encode_name("a/b c~")
    ('gsm8k-17', 'a%2Fb%20c%7E')

    Raises:
        ValueError: the name is empty or longer than MAX_NAME_LENGTH.
    """
    if _PLAIN.fullmatch(name):
        return name
    encoded = urllib.parse.quote(name, safe="").replace("~", "%7E")
    if not 0 < len(encoded) <= MAX_NAME_LENGTH:
        raise ValueError(
            f"a name of {len(encoded)} characters (1 to {MAX_NAME_LENGTH} are allowed): "
            f"{name[:32]!r}"
        )
    return encoded


def decode_name(encoded: str) -> str:
    """The name that `encode_name` was given."""
    return urllib.parse.unquote(encoded)
