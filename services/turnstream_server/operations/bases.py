"""The base models that workers serve, as they register them.

A worker registers at its start and renews. A base model without a worker is not served, and stays
registered.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple, cast

import redis

from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import run_command
from turnstream_server.operations.keys import BASES
from turnstream_server.operations.writes import essential_write, server_ms

LEASE_S: Final = 30.0
"""Seconds after which a base model without renewal is not served any more."""


class BaseModel(NamedTuple):
    """A base model that is served.

    Attributes:
        name: name by which clients ask for it.
        context_length: most tokens of a row.
        vocab_size: token ids below this exist.
        tokenizer_id: folder of its tokenizer for clients; "" if the name of the model is enough.
        max_rank: largest rank of an adapter; 0: only whole models are trained.
    """

    name: str
    context_length: int
    vocab_size: int
    tokenizer_id: str
    max_rank: int


def register_base(client: redis.Redis, base: BaseModel) -> None:
    """Register a base model, or renew it, for LEASE_S from now on."""
    value = json.dumps({**base._asdict(), "until_s": server_ms(client) / 1000 + LEASE_S})
    run_command(client, essential_write("HSET", BASES, base.name, value))


def read_bases(client: redis.Redis, *, is_served: bool = True) -> dict[str, BaseModel]:
    """Return the base models, each at its name, in order of the names.

    Without `is_served`, those whose workers are away are returned too.
    """
    now_s = server_ms(client) / 1000
    with translating():
        stored = cast("dict[bytes, bytes]", client.hgetall(BASES))
    found: dict[str, BaseModel] = {}
    for name in sorted(stored):
        fields = json.loads(stored[name])
        if fields.pop("until_s") > now_s or not is_served:
            base = BaseModel(**fields)
            found[base.name] = base
    return found
