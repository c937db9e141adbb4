"""The names of hosted models: their keys, and request ids. Nothing else writes such a key by hand.

A model, a sampling session, a client session and an owner have a slot each, `tm:{<id>}:`.

===========  ======  =======================================================================
model        hash    the record of a model, see `models.py`, and its position in the log: next,
                     the number that runs next; submitted, the newest number; gap_seq, gap_ms,
                     the missing number and since when, server ms; epoch, worker, lease_ms, the
                     worker that runs it until then, leased_ms, the length of its lease; covered,
                     checkpoint, the newest number that a durable checkpoint covers, and its name;
                     swept, the newest number whose content is deleted;
                     last_request_ms; ended, the reason of its end
commands     hash    number -> `<kind> <fingerprint of its content>`; `missing` for a number that
                     never arrived
bodies       hash    number -> content, until a durable checkpoint covers it; failed ones and those
                     of `forward` change nothing, and lose it with their result
results      hash    number -> result, until the session ends; a large one is replaced by a mark
                     before, see `results.py`
passes       hash    first number -> last number of calls that share a pass, until covered
sampler      hash    the record of a sampling session, see `samplers.py`
samples      hash    number -> fingerprint of its content
session      hash    the record of a client session, see `sessions.py`
members      set     ids of the models and sampling sessions of a client session
runs         zset    ids of the models of an owner, by server ms of their creation
sessions     zset    ids of the client sessions of an owner, by server ms of their creation
checkpoints  hash    path -> record of a saved checkpoint of an owner, see `checkpoints.py`
===========  ======  =======================================================================

`results` of a sampling session are as those of a model. Other keys are global:

===========  ======  =======================================================================
tm:bases     hash    name of a base model -> JSON, see `models.py`
tm:alive     zset    ids of client sessions, by server ms of their newest heartbeat
tm:expiries  zset    `<owner> <path>` of saved checkpoints, by the server ms of their deletion
tm:results   zset    request ids of large results, by the server ms of their deletion
tm:wake      stream  models with new commands, about the newest 1,000; field `m` = id
tm:done      stream  finished requests and sessions, about the newest 10,000; field `r` = id
===========  ======  =======================================================================

`tm:models:<base>` is the set of the models of a base model, and `tm:samples:<base>` the stream of
its unfinished samples. Both names are encoded. `tm:download:<token>` is a string, see
`checkpoints.py`, and expires.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from turnstream.errors import RecordError
from turnstream.types.names import encode_name

BASES: Final = "tm:bases"
ALIVE: Final = "tm:alive"
EXPIRIES: Final = "tm:expiries"
RESULTS: Final = "tm:results"
WAKE: Final = "tm:wake"
DONE: Final = "tm:done"

MODEL_ID: Final = re.compile(r"(?P<session>[^:/{}]+):train:(?P<number>\d+)")
SAMPLER_ID: Final = re.compile(r"(?P<session>[^:/{}]+):sample:(?P<number>\d+)")


class ModelKeys(NamedTuple):
    """The keys of one model, all in one slot."""

    model: str
    commands: str
    bodies: str
    results: str
    passes: str


class SamplerKeys(NamedTuple):
    """The keys of one sampling session, all in one slot."""

    sampler: str
    samples: str
    results: str


class SessionKeys(NamedTuple):
    """The keys of one client session, all in one slot."""

    session: str
    members: str


class OwnerKeys(NamedTuple):
    """The keys of one owner, all in one slot."""

    runs: str
    sessions: str
    checkpoints: str


def model_keys(model_id: str) -> ModelKeys:
    """Return the keys of a model.

    >>> model_keys("S:train:0").commands
    'tm:{S:train:0}:commands'
    """
    return ModelKeys(*_named(model_id, ModelKeys._fields))


def sampler_keys(sampler_id: str) -> SamplerKeys:
    """Return the keys of a sampling session."""
    return SamplerKeys(*_named(sampler_id, SamplerKeys._fields))


def session_keys(session_id: str) -> SessionKeys:
    """Return the keys of a client session."""
    return SessionKeys(*_named(session_id, SessionKeys._fields))


def owner_keys(owner: str) -> OwnerKeys:
    """Return the keys of an owner."""
    return OwnerKeys(*_named(owner, OwnerKeys._fields))


def models_key(base_model: str) -> str:
    """Return the key of the set of models of a base model."""
    return f"tm:models:{encode_name(base_model)}"


def samples_key(base_model: str) -> str:
    """Return the key of the stream of samples of a base model."""
    return f"tm:samples:{encode_name(base_model)}"


def download_key(token: str) -> str:
    """Return the key of a link to files."""
    return f"tm:download:{encode_name(token)}"


def _named(identity: str, parts: tuple[str, ...]) -> list[str]:
    return [f"tm:{{{identity}}}:{part}" for part in parts]


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
