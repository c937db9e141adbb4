"""Shares of the training calls of a hosted model, pulled from batcher replicas."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

import grpc

from turnstream.errors import (
    BatcherUnavailableError,
    InvalidConfigError,
    RecordError,
    TurnstreamError,
    UnavailableError,
    UnknownFormatError,
)
from turnstream.records.batches import decode_mini_batch
from turnstream.store.client.backoff import pause_after
from turnstream.store.run.batchers import Target
from turnstream.types import MiniBatch
from turnstream.wire.v1.operations_pb2 import (
    GetOperationsRequest,
    OperationChunk,
    OperationShareHeader,
)
from turnstream.worker._calls import ATTEMPT_S, error_of, reasons_of, retry_delay_s
from turnstream.worker._read_step import Arrival, read_parts
from turnstream.worker._replicas import Replicas

PATH = "/turnstream.wire.v1.Operations/Get"

MAX_DAMAGED = 3
"""Damage that repeats so often is in the batcher, not in the transfer."""


class PulledOperations(NamedTuple):
    """One rank's rows of a pass, and their loss with the settings that differ from its defaults."""

    mini_batch: MiniBatch
    loss: str
    settings: Mapping[str, float]


class OperationPuller:
    """Pulls the shares of one rank; a replica that does not answer is replaced by the next one.

    For one thread, except `close`. `timeout_s` limits a pull with its retries. The other arguments
    are those of `BatchStream`.
    """

    def __init__(
        self,
        target: Target,
        *,
        dp_rank: int,
        dp_world_size: int,
        timeout_s: float = 120.0,
        api_key: str | None = None,
    ) -> None:
        if not 0 <= dp_rank < dp_world_size:
            raise InvalidConfigError("dp_rank", f"{dp_rank} is not in a world of {dp_world_size}")
        self._dp_rank = dp_rank
        self._dp_world_size = dp_world_size
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        self._replicas = Replicas(target, api_key=api_key, timeout_s=timeout_s)

    def pull(
        self, model_id: str, *, first: int, last: int, skipped: Collection[int] = ()
    ) -> list[PulledOperations]:
        """Return this rank's share of each pass over the commands that are not skipped, in order.

        Raises:
            UnavailableError: no replica has sent all shares within the time limit.
            ReleasedError: a command has no content.
            CorruptRecordError: shares arrived damaged, several times.
        """
        request = GetOperationsRequest(
            model_id=model_id,
            first=first,
            last=last,
            dp_rank=self._dp_rank,
            dp_world_size=self._dp_world_size,
            skipped=sorted(skipped),
            reads_xxh3=True,
        )
        began_s = time.monotonic()
        num_failures = num_damaged = 0
        while True:
            left_s = began_s + self._timeout_s - time.monotonic()
            try:
                return self._attempt(request, within_s=min(ATTEMPT_S, max(left_s, 0.01)))
            except grpc.RpcError as rpc_error:
                error = error_of(rpc_error)
            except RecordError as record_error:
                error = record_error
            self._replicas.end_get(skips=isinstance(error, BatcherUnavailableError))
            num_failures += 1
            num_damaged += isinstance(error, RecordError)
            pause_s = _retry_pause_s(error, num_failures=num_failures)
            if pause_s is None or num_damaged >= MAX_DAMAGED:
                raise error
            waited_s = time.monotonic() - began_s
            if waited_s + pause_s >= self._timeout_s:
                raise self._late(error, request, waited_s=waited_s) from error
            self._closed.wait(pause_s)

    def close(self) -> None:
        """Close all connections; a pull in progress ends with an error."""
        self._replicas.close()
        self._closed.set()

    def _attempt(self, request: GetOperationsRequest, *, within_s: float) -> list[PulledOperations]:
        messages = self._replicas.get(PATH, request, timeout_s=within_s)
        pulled: list[PulledOperations] = []
        for arrival in read_parts(messages, OperationChunk, admit=_admit):
            header, data = arrival.header, arrival.buffer or b""
            mini_batch = decode_mini_batch(data, expected_hash=header.content_hash)
            pulled.append(PulledOperations(mini_batch, header.loss, dict(header.settings)))
        return pulled

    def _late(
        self, error: TurnstreamError, request: GetOperationsRequest, *, waited_s: float
    ) -> TurnstreamError:
        if not isinstance(error, UnavailableError):
            return error
        message = (
            f"commands {request.first} to {request.last} of model {request.model_id!r} were not "
            f"pulled within {self._timeout_s:g} s: {error}"
        )
        return type(error)(
            message, reasons_of(error, target=self._replicas.target, since_s=waited_s)
        )


def _admit(header: OperationShareHeader) -> Arrival[OperationShareHeader]:
    return Arrival(header, memoryview(bytearray(header.num_bytes)))


def _retry_pause_s(error: TurnstreamError, *, num_failures: int) -> float | None:
    """Return the seconds before another attempt; None where it cannot succeed."""
    if isinstance(error, RecordError) and not isinstance(error, UnknownFormatError):
        return pause_after(num_failures)
    return retry_delay_s(error, num_failures=num_failures)
