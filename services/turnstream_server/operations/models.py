"""Base models that workers serve, and hosted models that are made of them.

A worker registers its base models at its start and renews. A base model without a worker is not
served, and stays registered. A hosted model is made by `create_model`, and its record is kept after
its session has ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast

import redis
import redis.asyncio

from turnstream.errors import ConflictError, EndOfRunError, RunNotFoundError
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Script, run_command, run_command_async
from turnstream_server.ledger.core.scan import server_ms
from turnstream_server.operations.announcing import announce, essential_write
from turnstream_server.operations.contents import CreateModel, encode_content, fingerprint
from turnstream_server.operations.keys import BASES, RequestId, model_keys, models_key, owner_keys

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


_CREATE: Final = Script("create_model", "turnstream_server.operations")


class ModelRecord(NamedTuple):
    """A hosted model.

    Attributes:
        model_id: `<session>:train:<number>`.
        base_model: name of its base model.
        owner: the owner of its key, from `keys.records.owner_of`.
        lora_rank: rank of its adapter; 0 if all weights are trained.
        lora_seed: seed of the first weights of the adapter.
        train_attn, train_mlp, train_unembed: layers with an adapter.
        user_metadata: any JSON object of the client.
        created_ms, last_request_ms: server ms; 0 for a new one.
        ended: the reason of the end of its session; "" while it is open.
    """

    model_id: str
    base_model: str
    owner: str
    lora_rank: int
    lora_seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    user_metadata: Mapping[str, Any] = {}
    created_ms: int = 0
    last_request_ms: int = 0
    ended: str = ""

    @property
    def is_lora(self) -> bool:
        """Whether an adapter is trained, and not all weights."""
        return self.lora_rank > 0


_STORED: Final = (
    *("base_model", "owner", "lora_rank", "lora_seed", "train_attn", "train_mlp"),
    *("train_unembed", "user_metadata"),
)


async def create_model(
    client: redis.asyncio.Redis, record: ModelRecord, content: CreateModel
) -> RequestId:
    """Create a model, and its operation 0, once; return the request id of that operation.

    Raises:
        ConflictError: the id is that of a model with another record or content.
        EndOfRunError: the session of the model has ended.
    """
    keys = model_keys(record.model_id)
    data = encode_content(content)
    fields = [(name, json.dumps(getattr(record, name), sort_keys=True)) for name in _STORED]
    flat = [part for field in fields for part in field]
    entry = f"create {fingerprint(data + json.dumps(flat).encode())}"
    command = _CREATE([keys.model, keys.commands, keys.bodies], entry, data, *flat)
    code, *values = await run_command_async(client, command)
    if code == b"conflict":
        raise ConflictError(f"model {record.model_id!r} exists with other settings")
    if code == b"ended":
        raise EndOfRunError(f"the session of model {record.model_id!r} has ended")
    with translating():
        # Not before: a conflicting call must not list the model with another base model.
        await cast(Any, client.sadd(models_key(record.base_model), record.model_id))
        await client.zadd(owner_keys(record.owner).runs, {record.model_id: values[0]})
        await announce(client, record.model_id)
    return RequestId(record.model_id, 0)


async def read_model_async(client: redis.asyncio.Redis, model_id: str) -> ModelRecord:
    """Return the record of a model; RunNotFoundError if there is none."""
    with translating():
        stored = await cast(Any, client.hgetall(model_keys(model_id).model))
    return _record(model_id, stored)


def read_model(client: redis.Redis, model_id: str) -> ModelRecord:
    """Return the record of a model; RunNotFoundError if there is none."""
    with translating():
        stored = cast("dict[bytes, bytes]", client.hgetall(model_keys(model_id).model))
    return _record(model_id, stored)


def models_of_base(client: redis.Redis, base_model: str) -> list[str]:
    """Return the ids of the models of a base model whose sessions are open."""
    with translating():
        found = cast("set[bytes]", client.smembers(models_key(base_model)))
    return sorted(each.decode() for each in found)


async def models_of_owner(
    client: redis.asyncio.Redis, owner: str, *, offset: int, limit: int
) -> tuple[list[ModelRecord], int]:
    """Return a page of the models of an owner, the newest first, and the number of all."""
    key = owner_keys(owner).runs
    with translating():
        total = await client.zcard(key)
        found = await client.zrevrange(key, offset, offset + limit - 1) if limit else []
    names = cast("list[bytes]", found)
    return [await read_model_async(client, each.decode()) for each in names], total


def _record(model_id: str, stored: Mapping[bytes, bytes]) -> ModelRecord:
    if not stored:
        raise RunNotFoundError(f"there is no model {model_id!r}")
    values: dict[str, Any] = {name: json.loads(stored[name.encode()]) for name in _STORED}
    return ModelRecord(
        model_id=model_id,
        **values,
        created_ms=int(stored[b"created_ms"]),
        last_request_ms=int(stored[b"last_request_ms"]),
        ended=stored.get(b"ended", b"").decode(),
    )
