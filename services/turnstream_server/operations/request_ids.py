"""Request ids: `<id of a model or sampling session>:<number>`.

They follow from the call, so that a repeated call has the same one.
"""

from __future__ import annotations

from typing import NamedTuple

from turnstream.errors import RecordError
from turnstream_server.operations.keys import MODEL_ID, SAMPLER_ID


class RequestId(NamedTuple):
    """A request id; its text is what clients see.

    >>> str(RequestId("S:train:0", 4))
    'S:train:0:4'
    """

    target: str
    number: int

    @property
    def is_sample(self) -> bool:
        """Whether the target is a sampling session, and not a model."""
        return SAMPLER_ID.fullmatch(self.target) is not None

    def __str__(self) -> str:
        return f"{self.target}:{self.number}"


def parse_request_id(text: str) -> RequestId:
    """Return the parts of a request id; RecordError for another text.

    >>> parse_request_id("S:sample:1:77")
    RequestId(target='S:sample:1', number=77)
    """
    target, _, number = text.rpartition(":")
    known = MODEL_ID.fullmatch(target) or SAMPLER_ID.fullmatch(target)
    if known is None or not number.isdecimal():
        raise RecordError(f"request_id is {text!r}, expected <session>:train:<n>:<number>")
    return RequestId(target, int(number))
