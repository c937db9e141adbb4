"""Sampling sessions and their samples, from the gateway to a sampler and back.

The gateway submits with `submit_sample`. Samplers of a base model share its stream::

    with contextlib.closing(SampleQueue(client, "tiny", sampler="s0")) as queue:
        for sample in queue.read():
            queue.finish(sample, result)

A sample that was not finished is read again after a restart. Its first result stays.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple, cast

import numpy as np
import redis
import redis.asyncio
from numpy.typing import NDArray

from turnstream.errors import ConflictError, EndOfRunError, RejectedError, RunNotFoundError
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Script, run_command, run_command_async
from turnstream_server.models.sampling_params import SamplingParams
from turnstream_server.operations.announcing import (
    Wakeups,
    announce,
    announce_finished,
    essential_write,
)
from turnstream_server.operations.contents import fingerprint
from turnstream_server.operations.keys import (
    DONE,
    RequestId,
    parse_request_id,
    sampler_keys,
    samples_key,
    session_keys,
)
from turnstream_server.operations.operation_records import pack, unpack
from turnstream_server.operations.results import Failure, Result, encode_result, keep_unfetched

_SUBMIT: Final = Script("submit_sample", "turnstream_server.operations")
_FINISH: Final = Script("finish_sample", "turnstream_server.operations")
_GROUP: Final = "samplers"
_BLOCK_MS: Final = 1_000
_ABANDONED_MS: Final = 60_000
"""Time after which a sampler that answers nothing has lost a sample to another one."""


class SamplerRecord(NamedTuple):
    """A sampling session: an immutable snapshot of weights.

    Attributes:
        sampler_id: `<session>:sample:<number>`.
        base_model: name of its base model.
        owner: the owner of its key, from `keys.records.owner_of`.
        model_path: path of its checkpoint; None for the base model, or for weights without a name.
        folder: weights below the shared folder of the workers; None for the base model.
    """

    sampler_id: str
    base_model: str
    owner: str
    model_path: str | None = None
    folder: str | None = None


class SampleRequest(NamedTuple):
    """A call of a sampling session, as a sampler reads it.

    Attributes:
        request_id: see `RequestId`.
        folder: as in `SamplerRecord`.
        prompt: int32 (P,).
        params: parameters of the samples.
        entry: place in the stream.
        owner: owner of the session; "" for a sample that an earlier release has queued.
    """

    request_id: RequestId
    folder: PurePosixPath | None
    prompt: NDArray[np.int32]
    params: SamplingParams
    entry: bytes = b""
    owner: str = ""

    @property
    def session_id(self) -> str:
        """Return the id of its client session."""
        return self.request_id.target.partition(":")[0]


async def write_sampler_async(client: redis.asyncio.Redis, record: SamplerRecord) -> None:
    """Create a sampling session, or replace its weights."""
    key = sampler_keys(record.sampler_id).sampler
    with translating():
        await cast(Any, client.hset(key, "record", json.dumps(record._asdict())))


def write_sampler(client: redis.Redis, record: SamplerRecord) -> None:
    """Create a sampling session, or replace its weights."""
    key = sampler_keys(record.sampler_id).sampler
    run_command(client, essential_write("HSET", key, "record", json.dumps(record._asdict())))


async def read_sampler(client: redis.asyncio.Redis, sampler_id: str) -> SamplerRecord:
    """Return a sampling session; RunNotFoundError if there is none."""
    with translating():
        stored = await cast(Any, client.hget(sampler_keys(sampler_id).sampler, "record"))
    if stored is None:
        raise RunNotFoundError(f"there is no sampling session {sampler_id!r}")
    return SamplerRecord(**json.loads(stored))


async def submit_sample(
    client: redis.asyncio.Redis,
    record: SamplerRecord,
    number: int,
    prompt: NDArray[np.int32],
    params: SamplingParams,
) -> RequestId:
    """Queue a sample, once, and return its request id.

    Raises:
        ConflictError: the number was submitted with another content.
        EndOfRunError: the session has ended.
        RunNotFoundError: there is no such sampling session.
    """
    request_id = RequestId(record.sampler_id, number)
    header = {"folder": record.folder, "params": dataclasses.asdict(params)}
    data = pack(header, [prompt])
    if await _submit(client, request_id, data, result=b"") != b"finished":
        fields: dict[Any, Any] = {"r": str(request_id), "b": data, "o": record.owner}
        with translating():
            await client.xadd(samples_key(record.base_model), fields)
    return request_id


async def refuse_sample(
    client: redis.asyncio.Redis, sampler_id: str, number: int, refusal: Failure
) -> RequestId:
    """Record a sample that fails; errors as for `submit_sample`."""
    request_id = RequestId(sampler_id, number)
    result = encode_result(refusal)
    await _submit(client, request_id, result, result=result)
    with translating():
        await announce(client, request_id)
    return request_id


async def cancel_sample(client: redis.asyncio.Redis, request_id: RequestId) -> None:
    """Fail a sample without a result; its sampler drops it at the next token."""
    keys = sampler_keys(request_id.target)
    result = encode_result(Failure("the sample was cancelled", "user"))
    await run_command_async(
        client, _FINISH([keys.sampler, keys.results], request_id.number, result)
    )
    with translating():
        await announce(client, request_id)


async def _submit(
    client: redis.asyncio.Redis, request_id: RequestId, data: bytes, *, result: bytes
) -> bytes:
    keys = sampler_keys(request_id.target)
    command = _SUBMIT(
        [keys.sampler, keys.samples, keys.results], request_id.number, fingerprint(data), result
    )
    code = await run_command_async(client, command)
    if code == b"unknown":
        raise RunNotFoundError(f"there is no sampling session {request_id.target!r}")
    if code == b"conflict":
        message = f"seq_id {request_id.number} of {request_id.target!r} has come with other content"
        raise ConflictError(message)
    if code == b"ended":
        raise EndOfRunError(f"the session of {request_id.target!r} has ended")
    return code


class SampleQueue:
    """The samples of one base model, shared by its samplers.

    Unfinished samples of a sampler come again after its restart under the same name.
    """

    def __init__(self, client: redis.Redis, base_model: str, *, sampler: str) -> None:
        self._client = client
        self._key = samples_key(base_model)
        self._sampler = sampler
        self._own_position: bytes | None = b"0"
        """Newest unfinished sample of before the start that was read again; None after the last."""
        self._claimed: Any = "0-0"
        self._ended = Wakeups(client, DONE)
        self._create_group()

    def read(self, *, count: int = 64, block: bool = True) -> Iterator[SampleRequest]:
        """Yield new samples, after those that this sampler had not finished before its restart.

        Without any, the call returns after a second, or at once without `block`.
        """
        if self._own_position is not None:
            entries = self._read(self._own_position, count=count, block=False)
            if entries:
                self._own_position = entries[-1][0]
                yield from self._requests(entries)
                return
            self._own_position = None
        yield from self._requests(self._read(b">", count=count, block=block))

    def take_over(self) -> Iterator[SampleRequest]:
        """Yield samples that another sampler has not finished for a minute.

        Each call looks at a part of the unfinished samples; the next call continues there.
        """
        reply = self._of_group(
            lambda: self._client.xautoclaim(
                *(self._key, _GROUP, self._sampler, _ABANDONED_MS, self._claimed), count=64
            )
        )
        if reply:
            self._claimed = reply[0]
            yield from self._requests(reply[1])

    def renew(self, samples: Sequence[SampleRequest]) -> None:
        """Keep running samples from other samplers for another minute."""
        if samples:
            entries: Any = [each.entry for each in samples]
            with translating():
                self._client.xclaim(self._key, _GROUP, self._sampler, 0, entries, justid=True)

    def unwanted(self, samples: Sequence[SampleRequest]) -> list[SampleRequest]:
        """Return the samples that have a result, or whose session has ended or is finished."""
        with translating():
            pipeline = self._client.pipeline(transaction=False)
            for each in samples:
                keys = sampler_keys(each.request_id.target)
                pipeline.hexists(keys.results, str(each.request_id.number))
                pipeline.hmget(keys.sampler, "record", "ended")
                pipeline.hexists(session_keys(each.session_id).session, "finished")
            replies = iter(cast("list[Any]", pipeline.execute()))
        found: list[SampleRequest] = []
        for each in samples:
            has_result, (record, ended), is_finished = next(replies), next(replies), next(replies)
            if has_result or record is None or ended is not None or is_finished:
                found.append(each)
        return found

    def ended(self) -> set[str]:
        """Return the ids of requests and sessions that have ended since the last call.

        Waits a second for the first one. Ids are missed while the store is away.
        """
        return self._ended.read(block_s=_BLOCK_MS / 1_000)

    def finish(self, sample: SampleRequest, result: Result) -> None:
        """Write the result of a sample, unless it has one, and notify its waiters."""
        keys = sampler_keys(sample.request_id.target)
        number = sample.request_id.number
        data = encode_result(result)
        keep_unfetched(self._client, [(sample.request_id, data)])
        command = _FINISH([keys.sampler, keys.results], number, data)
        run_command(self._client, command)
        announce_finished(self._client, [sample.request_id])
        with translating():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.xack(self._key, _GROUP, sample.entry)
            pipeline.xdel(self._key, sample.entry)
            pipeline.execute()

    def close(self) -> None:
        """Remove the sampler from those of the base model, unless it has unfinished samples."""
        found = self._of_group(lambda: self._client.xinfo_consumers(self._key, _GROUP))
        names = [each["name"].decode() for each in found or () if not each["pending"]]
        if self._sampler in names:
            with translating():
                self._client.xgroup_delconsumer(self._key, _GROUP, self._sampler)

    def _read(self, position: bytes, *, count: int, block: bool) -> list[tuple[bytes, Any]]:
        wait_ms = _BLOCK_MS if block else None
        reply = self._of_group(
            lambda: self._client.xreadgroup(
                _GROUP, self._sampler, {self._key: position}, count=count, block=wait_ms
            )
        )
        return reply[0][1] if reply else []

    def _of_group(self, call: Callable[[], Any]) -> Any:
        """Return the reply of a call; None if the store has lost the group, which is made again."""
        try:
            with translating():
                return call()
        except RejectedError as error:
            if "NOGROUP" not in str(error):
                raise
            self._create_group()
            return None

    def _requests(
        self, entries: Iterable[tuple[bytes, dict[bytes, bytes]]]
    ) -> Iterator[SampleRequest]:
        """Yield the requests of entries; one of another release fails, and blocks no others."""
        for entry, fields in entries:
            if not fields:
                continue
            try:
                sample = _request(entry, fields)
            except (ValueError, KeyError, TypeError) as error:
                self._refuse(entry, fields, f"the sampler cannot read this sample: {error!r}")
            else:
                yield sample

    def _refuse(self, entry: bytes, fields: dict[bytes, bytes], reason: str) -> None:
        request_id = parse_request_id(fields[b"r"].decode())
        nothing = np.empty(0, np.int32)
        sample = SampleRequest(request_id, None, nothing, SamplingParams(), entry)
        self.finish(sample, Failure(reason, "server"))

    def _create_group(self) -> None:
        try:
            with translating():
                self._client.xgroup_create(self._key, _GROUP, id="0", mkstream=True)
        except RejectedError as error:
            if "BUSYGROUP" not in str(error):
                raise


def _request(entry: bytes, fields: dict[bytes, bytes]) -> SampleRequest:
    header, (prompt,) = unpack(fields[b"b"])
    values = dict(header["params"])
    for name in ("stop_ids", "stop_strings"):
        values[name] = None if values[name] is None else tuple(values[name])
    folder = header["folder"]
    return SampleRequest(
        request_id=parse_request_id(fields[b"r"].decode()),
        folder=None if folder is None else PurePosixPath(folder),
        prompt=prompt,
        params=SamplingParams(**values),
        entry=entry,
        owner=fields.get(b"o", b"").decode(),
    )
