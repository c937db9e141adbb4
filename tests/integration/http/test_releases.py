"""SDK and gateway of different releases: the wire has new fields and kinds, or other scripts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
import redis
from fastapi.responses import Response
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from testkit import group
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from turnstream.generator import Publisher, requests
from turnstream.generator.transport.messages import MEDIA_TYPE
from turnstream.generator.transport.transport import first_words
from turnstream.http.problems import HEADER
from turnstream.store.client.scripts import Script
from turnstream.wire.v1 import calls_pb2 as wire
from turnstream.wire.v1 import records_pb2
from turnstream_server.gateway.rest.generators import route

pytestmark = pytest.mark.redis

_NEW_FIELD = 99
_STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE


def next_release() -> Any:
    """Return the class `Calls` of a later release: a field and a kind of call have come."""
    pool, found = descriptor_pool.DescriptorPool(), descriptor_pb2.FileDescriptorProto()
    pool.AddSerializedFile(records_pb2.DESCRIPTOR.serialized_pb)
    wire.DESCRIPTOR.CopyToProto(found)
    messages = {each.name: each for each in found.message_type}
    messages["ReadConfig"].field.add(name="note", number=_NEW_FIELD, type=_STRING, label=1)
    kind = ".turnstream.wire.v1.ReadConfig"
    messages["Call"].field.add(
        name="new_kind", number=_NEW_FIELD, type=_MESSAGE, type_name=kind, label=1, oneof_index=0
    )
    pool.Add(found)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("turnstream.wire.v1.Calls"))


def other(script: Script) -> Script:
    """Return a script that does the same, and is another one for the store."""
    found = object.__new__(Script)
    found.name, found.source = script.name, script.source + "\n-- of another release\n"
    found.sha = hashlib.sha1(found.source.encode(), usedforsecurity=False).hexdigest()
    return found


def test_gateway_takes_the_calls_of_a_later_sdk(
    gateway: GatewayThread, client: redis.Redis, new_run: Callable[..., str]
) -> None:
    body = next_release()(run=new_run(client), writer="w")
    body.calls.add().read_config.note = "new"
    body.calls.add().new_kind.note = "new"
    body.calls.add().read_waits.SetInParent()

    answer = httpx2.post(
        f"{gateway.base_url}/v1/calls",
        content=body.SerializeToString(),
        headers={"Content-Type": MEDIA_TYPE, HEADER: "1"},
    )

    replies = wire.Replies.FromString(answer.content).replies
    assert [each.WhichOneof("kind") for each in replies] == ["items", "refusal", "items"]
    assert replies[1].refusal.startswith("INVALID the gateway does not know this kind of call")


def test_sdk_takes_the_replies_of_a_later_gateway_with_other_scripts(
    new_gateway: Callable[..., GatewayThread],
    client: redis.Redis,
    new_run: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("OPEN_GROUP", "_APPEND", "_POST_SEALED")
    scripts = {name: other(getattr(requests, name)) for name in names}
    for name, script in scripts.items():
        monkeypatch.setattr(requests, name, script)
    every = (*requests.SCRIPTS, *requests.SINGLE_SCRIPTS, *scripts.values())
    monkeypatch.setattr(route, "_FIRST_WORDS", first_words(every))
    new_field = b"\xba\x06\x03new"
    monkeypatch.setattr(
        route, "Response", lambda body, **fields: Response(body + new_field, **fields)
    )
    run = new_run(client)

    with Publisher(new_gateway().base_url, run) as publisher:
        publisher.publish(group("g")).result(30)

    assert RunReader(client, run).counts() == {"accepted": 2, "sealed": 2}
    known: Any = client.script_exists(*[each.sha for each in scripts.values()])
    assert known == [True, True, True]
