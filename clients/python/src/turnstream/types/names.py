"""Names of runs and groups in the form in which they are part of keys and ids; texts of users."""

from __future__ import annotations

import functools
import re
import urllib.parse

from turnstream.errors import InvalidConfigError, InvalidTurnError

MAX_NAME_LENGTH = 512
"""Of an encoded run or group name: a ledger field is kept in memory for every trajectory."""

_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,128}")


@functools.lru_cache(maxsize=4096)
def encode_name(name: str) -> str:
    """The form of a run or group name that is safe inside a key.

    >>> encode_name("gsm8k-17"), encode_name("a/b c~")
    ('gsm8k-17', 'a%2Fb%20c%7E')

    Raises:
        ValueError: the name is empty, longer than MAX_NAME_LENGTH or no valid Unicode.
    """
    if _PLAIN.fullmatch(name):
        return name
    if trouble := text_trouble(name):
        raise ValueError(trouble)
    encoded = urllib.parse.quote(name, safe="").replace("~", "%7E")
    if not 0 < len(encoded) <= MAX_NAME_LENGTH:
        raise ValueError(
            f"a name of {len(encoded)} characters (1 to {MAX_NAME_LENGTH} are allowed): "
            f"{name[:32]!r}"
        )
    return encoded


def encode_run(run: str) -> str:
    """The same of a run's name.

    Raises:
        InvalidConfigError: no run can have this name.
    """
    try:
        return encode_name(run)
    except ValueError as error:
        raise InvalidConfigError("run", str(error)) from error


def decode_name(encoded: str) -> str:
    """The name that `encode_name` was given."""
    return urllib.parse.unquote(encoded)


def text_trouble(text: object) -> str:
    r"""Why a value cannot be written as a text, for people; "" where it can.

    >>> text_trouble("half of a pair: \ud800"), text_trouble(3), text_trouble("a")
    ("'half of a pair: \\ud800' is no valid Unicode", '3 is not a text', '')
    """
    if not isinstance(text, str):
        return f"{text!r} is not a text"
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair has no UTF-8 form
        return f"{text!r} is no valid Unicode"
    return ""


def checked_text(text: object, *, field: str) -> str:
    """A text of a turn, a trajectory or a reward, which has a UTF-8 form.

    Raises:
        InvalidTurnError: it has none.
    """
    if trouble := text_trouble(text):
        raise InvalidTurnError(field, trouble)
    return str(text)


def checked_setting(text: object, *, field: str) -> str:
    """A text of whoever drives a run or a session, which has a UTF-8 form.

    Raises:
        InvalidConfigError: it has none.
    """
    if trouble := text_trouble(text):
        raise InvalidConfigError(field, trouble)
    return str(text)
