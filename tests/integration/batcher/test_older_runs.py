"""A run that an older release wrote is refused with one sentence, and stays as it is.

`older_run.json` holds every key of a store after release 3a1c731 ran one: three published groups, a
planned and a trained batch, and a snapshot of its planner.
"""

import base64
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import turnstream
from testkit import config, group, wait_until_async
from turnstream.errors import UnknownFormatError
from turnstream.records.configs import RUN_FORMAT
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream_server import cli
from turnstream_server.embedded import EmbeddedServer

RUN = "older"
SENTENCE = (
    "was written by an older release of Turnstream (format 0; this one reads format "
    f"{RUN_FORMAT}): finish the run with that release, or remove it with `turnstream run delete`"
)
SAID = re.escape(SENTENCE)


def write(client: redis.Redis, name: str, kind: str, value: Any) -> None:
    read = base64.b64decode
    match kind:
        case "hash":
            client.hset(name, mapping={read(field): read(text) for field, text in value})
        case "set":
            client.sadd(name, *map(read, value))
        case "stream":
            for entry_id, fields in value:
                client.xadd(name, {read(each): read(text) for each, text in fields}, id=entry_id)
        case _:
            raise ValueError(kind)


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    stored = json.loads((Path(__file__).parent / "older_run.json").read_text())
    with connect(server.url) as client:
        for name, entry in stored.items():
            write(client, name, entry["type"], entry["value"])
        yield client


def dump(client: redis.Redis) -> dict[str, bytes | None]:
    return {name: client.dump(name) for name in keys.run_keys(RUN)}


def test_connected_program_cannot_open_an_older_run(
    server: EmbeddedServer, client: redis.Redis
) -> None:
    before = dump(client)

    with turnstream.connect(server.url) as service, pytest.raises(UnknownFormatError) as caught:
        service.run(RUN)
    with turnstream.connect(server.url) as service, pytest.raises(UnknownFormatError, match=SAID):
        service.create_run(RUN, config())

    assert str(caught.value) == f"run {RUN!r} {SENTENCE}"
    assert dump(client) == before


async def test_batcher_neither_leads_nor_serves_an_older_run(
    cluster: Any, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    before = dump(client)
    batcher = await cluster.start_batcher()
    newer = cluster.create_run(batch_groups=1)
    await cluster.publish(newer, group("g0"))

    with pytest.raises(UnknownFormatError, match=SAID):
        await cluster.trainer(batcher, RUN).start()

    refusal = f"run {RUN!r} {SENTENCE}"
    await wait_until_async(lambda: refusal in caplog.text, describe="the log of the refusal")
    trainer = cluster.trainer(batcher, newer)
    await trainer.start()
    assert await trainer.get(1)  # another run of the same store is not disturbed
    assert dump(client) == before


@pytest.mark.parametrize(
    "words",
    [
        *(["status"], ["status", RUN], ["why", RUN], ["run", "show", RUN], ["run", "pause", RUN]),
        *(["run", "close", RUN], ["ledger", RUN], ["dead", "list", RUN]),
    ],
    ids=" ".join,
)
def test_command_refuses_an_older_run(
    words: list[str],
    server: EmbeddedServer,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = dump(client)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", server.url)
    monkeypatch.setattr(sys, "argv", ["turnstream", *words])

    with pytest.raises(SystemExit) as ended:
        cli.main()
    seen = capsys.readouterr()

    assert ended.value.code == 1
    assert SENTENCE in " ".join((seen.out + seen.err).split())
    assert dump(client) == before
