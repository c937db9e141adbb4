"""A trainer's calls to one batcher, over real gRPC."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest

import testkit
from turnstream.errors import NotReadyError
from turnstream.records.batches import decode_mini_batch
from turnstream.records.statuses import status_to_error
from turnstream.types import MiniBatch, RecoveryToken
from turnstream.wire.v1 import batches_pb2 as wire


class Pulled(NamedTuple):
    """A received mini-batch."""

    header: wire.MiniBatchHeader
    mini_batch: MiniBatch
    data: bytes

    @property
    def rows(self) -> list[str]:
        """Its rows in letters, inert ones included."""
        return testkit.spell(self.mini_batch.rows)


class Trainer:
    """A trainer's calls to one batcher."""

    def __init__(self, address: str, run: str) -> None:
        self.run = run
        self.session_epoch = 0
        self.dp_world_size = 1
        self._channel = grpc.aio.insecure_channel(address)

    async def start(
        self, session: str = "s", *, token: str = "", dp_world_size: int = 1
    ) -> wire.StartReply:
        """Begin a session; later calls carry its epoch."""
        request = wire.StartRequest(
            run=self.run, recovery_token=token, dp_world_size=dp_world_size, session=session
        )
        reply = await self._call("Start", request, wire.StartReply)
        self.session_epoch = reply.session_epoch
        self.dp_world_size = dp_world_size
        return reply

    async def get(
        self, step: int, *, dp_rank: int = 0, wait_s: float = 30.0, **knows: Any
    ) -> list[Pulled]:
        """All mini-batches of a step."""
        request = wire.GetRequest(
            run=self.run,
            step=step,
            dp_rank=dp_rank,
            dp_world_size=self.dp_world_size,
            session_epoch=self.session_epoch,
            wait_s=wait_s,
            **knows,
        )
        call = self._channel.unary_stream(
            "/turnstream.wire.v1.Batches/Get",
            request_serializer=wire.GetRequest.SerializeToString,
            response_deserializer=wire.GetChunk.FromString,
        )
        headers: list[wire.MiniBatchHeader] = []
        data: list[bytearray] = []
        try:
            async for chunk in call(request):
                if chunk.HasField("header"):
                    headers.append(chunk.header)
                    data.append(bytearray())
                else:
                    data[-1] += chunk.data
        except grpc.aio.AioRpcError as error:
            raise status_to_error(error.code().name, error.details() or "") from error
        return [
            Pulled(header, decode_mini_batch(raw), bytes(raw))
            for header, raw in zip(headers, data, strict=True)
        ]

    async def refused(self, step: int, *, words: str) -> NotReadyError:
        """Return the error of a wait for a step, once it has these words."""

        async def ends() -> NotReadyError | None:
            with pytest.raises(NotReadyError) as caught:
                await self.get(step, wait_s=0.1)
            return caught.value if re.search(words, str(caught.value)) else None

        error = await testkit.wait_until_async(ends, describe=f"to be told {words!r}")
        assert error is not None
        return error

    async def stepped(self, pulled: Sequence[Pulled], *, dp_rank: int = 0) -> RecoveryToken:
        """Acknowledge the step that these mini-batches are of."""
        info = pulled[-1].mini_batch.info
        request = wire.SteppedRequest(
            run=self.run,
            step=info.step,
            session_epoch=self.session_epoch,
            manifest_hash=info.manifest_hash,
            dp_rank=dp_rank,
        )
        reply = await self._call("Stepped", request, wire.SteppedReply)
        return RecoveryToken.parse(reply.recovery_token)

    async def committed(self, token: RecoveryToken) -> None:
        """Say that the checkpoint with this token is on disk."""
        request = wire.CommittedRequest(
            run=self.run, recovery_token=str(token), session_epoch=self.session_epoch
        )
        await self._call("Committed", request, wire.CommittedReply)

    async def train(self, *steps: int, commits: bool = True) -> list[RecoveryToken]:
        """Pull steps, acknowledge them, and commit each; return their tokens."""
        tokens: list[RecoveryToken] = []
        for step in steps:
            tokens.append(await self.stepped(await self.get(step)))
            if commits:
                await self.committed(tokens[-1])
        return tokens

    async def announce_version(self, version: int, *, step: int, weights_uri: str = "") -> None:
        """Say that new weights exist."""
        request = wire.AnnounceVersionRequest(
            run=self.run,
            version=version,
            step=step,
            session_epoch=self.session_epoch,
            weights_uri=weights_uri,
        )
        await self._call("AnnounceVersion", request, wire.AnnounceVersionReply)

    async def move_to(self, address: str) -> None:
        """Call another replica from now on."""
        await self._channel.close()
        self._channel = grpc.aio.insecure_channel(address)

    async def close(self) -> None:
        """Disconnect."""
        await self._channel.close()

    async def _call(self, method: str, request: Any, reply: Any) -> Any:
        call = self._channel.unary_unary(
            f"/turnstream.wire.v1.Batches/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        try:
            return await call(request)
        except grpc.aio.AioRpcError as error:
            raise status_to_error(error.code().name, error.details() or "") from error
