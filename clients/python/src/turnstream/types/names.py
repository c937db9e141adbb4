"""Values that callers pass, and their checks: names in their form for keys, texts, numbers."""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import re
import reprlib
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from turnstream.errors import InvalidConfigError, InvalidTurnError

MAX_NAME_LENGTH = 512
"""Longest encoded name of a run or group: the ledger keeps one in memory per trajectory."""

_MAX_FILE_NAME = 255
_CUT_FILE_NAME = 200
_SHOWN_LENGTH = 80
_SHOWN_BITS = 128
_SHOWN_NUMBERS = 8

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 3
_BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxdict = 40
_BRIEF.maxstring = _BRIEF.maxother = _SHOWN_LENGTH

_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LATER_RUN = re.compile(r"(.+)~([2-9]|[1-9][0-9]+)", re.DOTALL)
_RESERVED_END = re.compile(r"~[0-9]+\Z")


class RunId(str):
    """The id of one run: its name; for the second run of that name `<name>~2`, then `<name>~3`.

    A name can be used again after its run was deleted. Keys and files are named by the id, so that
    two runs of one name never share any. A function that takes a name also takes an id: it then
    works on that very run.

    >>> RunId("maze").name, RunId("maze").incarnation
    ('maze', 1)
    >>> RunId("maze~2").name, RunId("maze~2").incarnation
    ('maze', 2)
    """

    __slots__ = ()

    @classmethod
    def of(cls, name: str, incarnation: int) -> RunId:
        """Return the id of the n-th run of a name, from 1.

        >>> RunId.of("maze", 1), RunId.of("maze", 2)
        ('maze', 'maze~2')
        """
        return cls(name if incarnation == 1 else f"{name}~{incarnation}")

    @property
    def name(self) -> str:
        """Name that a user gave the run."""
        found = _LATER_RUN.fullmatch(self)
        return found[1] if found else str(self)

    @property
    def incarnation(self) -> int:
        """Number of the run among those of its name, from 1."""
        found = _LATER_RUN.fullmatch(self)
        return int(found[2]) if found else 1


def is_run_id(run: str) -> bool:
    """Return whether a text is the id of one run, whatever run has its name now."""
    return isinstance(run, RunId) or RunId(checked_setting(run, field="run")).incarnation > 1


@functools.lru_cache(maxsize=4096)
def encode_name(name: str) -> str:
    """Return the form of a run or group name that is safe inside a key.

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
    """Return the form of a run's id that is safe inside a key; only an id has a `~` in it.

    >>> encode_run("a/b"), encode_run("a/b~2"), encode_run("a~b")
    ('a%2Fb', 'a%2Fb~2', 'a%7Eb')
    """
    later = _LATER_RUN.fullmatch(checked_setting(run, field="run"))
    try:
        return f"{encode_name(later[1])}~{later[2]}" if later else encode_name(run)
    except ValueError as error:
        raise InvalidConfigError("run", str(error)) from error


def checked_run_name(name: str) -> str:
    """Return the name of a run that is to be created; InvalidConfigError if it has no address.

    `.` and `..` have none below `/v1/runs`. Names that end like the ids of later runs are refused.

    >>> checked_run_name("maze~b")
    'maze~b'
    >>> checked_run_name("maze~2")
    Traceback (most recent call last):
    turnstream.errors.InvalidConfigError: run: 'maze~2' ends in '~' and digits, as only the ids of \
later runs of a name do; choose another name
    """
    if name in (".", ".."):
        raise InvalidConfigError("run", f"{name!r} is no name of a run; choose another name")
    if _RESERVED_END.search(name):
        raise InvalidConfigError(
            "run",
            f"{name!r} ends in '~' and digits, as only the ids of later runs of a name do; "
            "choose another name",
        )
    return name


def file_name(name: str) -> str:
    """Return the name of a file or folder for the name of a run, a model or a checkpoint.

    File systems allow 255 bytes. A longer name is cut, and ends in `~` and a digest. No other file
    name has a `~`.

    >>> file_name("a/b"), file_name("v1.0"), file_name("..")
    ('a%2Fb', 'v1.0', '%2E%2E')
    >>> file_name("a" * 300)[180:]
    'aaaaaaaaaaaaaaaaaaaa~9835fa6bf4e20a9b9ea812506302e989'

    Raises:
        ValueError: as `encode_name`.
    """
    encoded = encode_name(name)
    if len(encoded) > _MAX_FILE_NAME:
        digest = hashlib.sha256(encoded.encode()).hexdigest()[:32]
        return f"{encoded[:_CUT_FILE_NAME]}~{digest}"
    return encoded.replace(".", "%2E") if encoded in (".", "..") else encoded


def decode_name(encoded: str) -> str:
    """Return the name that `encode_name` was given."""
    return urllib.parse.unquote(encoded)


def quoted(value: object) -> str:
    """Return a value as an error shows it: its repr, shortened where it is long.

    >>> quoted("a"), quoted(10**400)
    ("'a'", 'a whole number of 1329 bits')
    >>> quoted("a" * 200)[-24:]
    'aaa... (202 characters)'
    >>> quoted([7] * 1_000_000)[-28:]
    '7, 7, 7... (1000000 entries)'
    """
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"a whole number of {value.bit_length()} bits"
    try:
        if type(value) in (list, tuple, dict):  # its repr may have many megabytes
            text, entries = _BRIEF.repr(value), cast("list[object]", value)
            long = f"{text[:_SHOWN_LENGTH]}... ({len(entries)} entries)"
            return text if len(text) <= _SHOWN_LENGTH else long
        text = repr(value)
    except Exception:  # noqa: BLE001 - the caller's own repr() may raise anything
        return f"a value of type {type(value).__name__}"
    if len(text) <= _SHOWN_LENGTH:
        return text
    return f"{text[:_SHOWN_LENGTH]}... ({len(text)} characters)"


def few_of(numbers: Sequence[object]) -> str:
    """Return a list of samples, ranks or rows as a message shows it, eight of them at most.

    >>> few_of((1, 3)), few_of(range(10))
    ('1, 3', '0, 1, 2, 3, 4, 5, 6, 7 and 2 others')
    """
    text = ", ".join(map(str, numbers[:_SHOWN_NUMBERS]))
    num_others = len(numbers) - _SHOWN_NUMBERS
    return text if num_others <= 0 else f"{text} and {num_others:,} others"


def text_trouble(text: object) -> str:
    r"""Return why a value cannot be written as a text, for people; "" where it can.

    >>> text_trouble("half of a pair: \ud800"), text_trouble(3), text_trouble("a")
    ("'half of a pair: \\ud800' is no valid Unicode", '3 is not a text', '')
    """
    if not isinstance(text, str):
        return f"{quoted(text)} is not a text"
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair has no UTF-8 form
        return f"{quoted(text)} is no valid Unicode"
    return ""


def checked_text(text: object, *, field: str) -> str:
    """Return a text of a turn, a trajectory or a reward; InvalidTurnError if it is no UTF-8."""
    if type(text) is str and text.isascii():  # most texts
        return text
    if trouble := text_trouble(text):
        raise InvalidTurnError(field, trouble)
    return str(text)


MAX_CALL_ID_LENGTH = 64


def call_id_trouble(call_id: object) -> str:
    """Return why this is no id of a model call; empty if it is one.

    >>> call_id_trouble("chatcmpl-7"), call_id_trouble("naïve")
    ('', "'naïve' is not a text of 1 to 64 printable ASCII characters")
    """
    text = call_id if isinstance(call_id, str) else ""
    if 1 <= len(text) <= MAX_CALL_ID_LENGTH and text.isascii() and text.isprintable():
        return ""
    return (
        f"{quoted(call_id)} is not a text of 1 to {MAX_CALL_ID_LENGTH} printable ASCII characters"
    )


def checked_setting(text: object, *, field: str) -> str:
    """Return a text of a run or a session; InvalidConfigError if it is no UTF-8."""
    if trouble := text_trouble(text):
        raise InvalidConfigError(field, trouble)
    return str(text)


MAX_SECONDS = 1e9
"""Longest timeout, about 30 years: the clocks of threads count no further."""

_Refusal = type[InvalidTurnError] | type[InvalidConfigError]


def finite_number(value: Any, *, field: str, refusal: _Refusal = InvalidTurnError) -> float:
    """Return a number as a finite float; numpy scalars and torch scalars are numbers too.

    Every check of this module raises an error of type `refusal`, which names field and value.
    """
    if type(value) is float and math.isfinite(value):  # most values
        return value
    if isinstance(value, str | bytes | bytearray):  # float() would parse them
        raise refusal(field, f"{quoted(value)} is not a number")
    try:
        number = float(out_of_its_graph(value))
    except (TypeError, ValueError) as error:
        raise refusal(field, f"{quoted(value)} is not a number") from error
    except OverflowError as error:
        raise refusal(field, f"{quoted(value)} is not finite as a float") from error
    if not math.isfinite(number):
        raise refusal(field, f"{number!r} is not finite")
    return number


def whole_number(
    value: Any,
    *,
    field: str,
    least: int = 0,
    limit: int,
    refusal: _Refusal = InvalidTurnError,
) -> int:
    """Return a whole number from `least` to `limit` - 1 as an int; booleans are not numbers."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise refusal(field, f"{quoted(value)} is not a whole number") from error
    if not least <= number < limit or isinstance(value, bool):
        raise refusal(field, f"{quoted(value)} is not a whole number from {least} to {limit - 1}")
    return number


def flag(value: Any, *, field: str) -> bool:
    """Return True or False, also of numpy."""
    if value is False or value is True:  # most values
        return value
    if not isinstance(value, bool | np.bool_):
        raise InvalidTurnError(field, f"{quoted(value)} is neither True nor False")
    return bool(cast("bool", value))


def seconds(value: Any, *, field: str, least: float = -MAX_SECONDS) -> float:
    """Return a timeout in seconds; InvalidConfigError if it is not from `least` to MAX_SECONDS."""
    is_flag = isinstance(value, bool | np.bool_)
    number = math.nan if is_flag else finite_number(value, field=field, refusal=InvalidConfigError)
    if not least <= number <= MAX_SECONDS:
        raise InvalidConfigError(
            field, f"{quoted(value)} is not a number of seconds from {least:g} to {MAX_SECONDS:g}"
        )
    return number


def timeout(value: Any, *, field: str) -> float | None:
    """Return a timeout in seconds, or None for no timeout."""
    return None if value is None else seconds(value, field=field)


def named_values(values: Any, *, field: str) -> dict[str, Any]:
    """Return a mapping whose keys are texts as a dict; None has no names."""
    if values is None or (type(values) is dict and not values):
        return {}
    if not isinstance(values, Mapping):
        raise InvalidTurnError(field, f"{quoted(values)} is not a mapping of names to values")
    given = cast("Mapping[Any, Any]", values)
    return {checked_text(name, field=field): given[name] for name in given}


def named_numbers(values: Any, *, field: str) -> dict[str, float]:
    """Return a mapping of texts to finite numbers as a dict, sorted by key."""
    if not (given := named_values(values, field=field)):
        return given
    return {name: finite_number(given[name], field=f"{field}[{name!r}]") for name in sorted(given)}


def out_of_its_graph(values: Any) -> Any:
    """Return a torch tensor as numpy can take it, and any other value as it is.

    Torch is not imported. Rewards come from reward models, often in bfloat16 and with a graph
    that is not wanted.
    """
    if not callable(getattr(values, "detach", None)):
        return values
    tensor = values.detach().cpu()
    # numpy has no bfloat16.
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
