"""The calls of `turnstream.wire.v1.Batches`: Turnstream errors, and bounded retries."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from turnstream.errors import (
    BatcherUnavailableError,
    ConflictError,
    InvalidConfigError,
    NotReadyError,
    RejectedError,
    TurnstreamError,
    UnavailableError,
    WaitReason,
)
from turnstream.records.statuses import status_to_error
from turnstream.store.client.backoff import pause_after
from turnstream.store.client.connection import OwnProcess
from turnstream.store.run.batchers import Target
from turnstream.store.waits.awaited import batcher_away, not_acknowledged
from turnstream.store.waits.wait_warnings import WaitWarnings
from turnstream.types.names import checked_setting
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream.worker._read_step import Arrival
from turnstream.worker._replicas import NO_ANSWER, Replicas

_logger = logging.getLogger(__name__)

ATTEMPT_S = 30.0
"""Longest attempt of an acknowledging call. A longer one is repeated."""

LEAST_ATTEMPT_S = 1.0
"""No attempt is repeated with less time than this: its timeout says nothing about the batcher."""

RANK_DELAY_S = 0.25
"""Longest pause of a rank that waits for the other ranks of its step."""

MAX_STEPS = 1000
"""Acknowledged steps in memory. A store loses some seconds, and a step takes milliseconds."""

_LATE_PING = "ping timeout"
"""Part of gRPC's message where the answer to a ping is late."""

_SILENT = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Statuses of a call that ended on this side, without a refusal."""

Result = TypeVar("Result")


class BatcherCalls:
    """The calls of one rank of a trainer or an observer to a batcher.

    A call without an answer goes to the next replica.
    """

    def __init__(
        self,
        target: Target,
        run: str,
        dp_rank: int,
        dp_world_size: int,
        *,
        timeout_s: float,
        observer: str = "",
        api_key: str | None = None,
    ) -> None:
        if not 0 <= dp_rank < dp_world_size:
            raise InvalidConfigError("dp_rank", f"{dp_rank} is not in a world of {dp_world_size}")
        self.run = checked_setting(run, field="run")
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self._observer = checked_setting(observer, field="observer")
        self._timeout_s = timeout_s
        self._session_epoch = 0
        self._session = ""
        self._closed = threading.Event()
        remedy = "pass the run to the other process, and call run.batches() there"
        self.process = OwnProcess("a batch stream", remedy=remedy)
        # (step, manifest hash) of each acknowledged step; replaced and never changed: another
        # thread reads it.
        self._steps: tuple[tuple[int, str], ...] = ()
        self._announced: dict[str, Any] | None = None
        self.replicas = Replicas(target, api_key=api_key, timeout_s=timeout_s)

    @property
    def target(self) -> str:
        """Addresses of the replicas, with commas between them."""
        return self.replicas.target

    def start(self, *, recovery_token: str, session: str) -> wire.StartReply:
        """Begin a session, or resume it; later calls carry its epoch and its run id."""
        reply: wire.StartReply = self._begin(
            "Start",
            "the beginning of a trainer session",
            recovery_token=checked_setting(recovery_token, field="recovery_token"),
            dp_world_size=self.dp_world_size,
            session=checked_setting(session, field="session"),
        )
        self._session_epoch, self._session = reply.session_epoch, session
        return reply

    def observe(self, *, first_step: int, expiry_s: float) -> wire.ObserveReply:
        """Register the observer of this share, or resume it."""
        return self._begin(
            "Observe",
            f"the beginning of observer {self._observer}",
            observer=self._observer,
            first_step=first_step,
            expiry_s=expiry_s,
        )

    def _begin(self, method: str, what: str, **fields: Any) -> Any:
        """Return the first reply; later calls name its run id, whose name may go to another run.

        After an error this is closed.
        """
        try:
            reply = self._repeat(method, what, run=self.run, **fields)
        except BaseException:
            self.close()
            raise
        if reply.run:  # a batcher of an older release does not send it
            self.run = reply.run
        return reply

    def get(
        self,
        step: int,
        *,
        wait_s: float,
        previous_hash: str = "",
        manifest_hash: str = "",
        num_mini_batches: int = 0,
        arrival: Arrival[wire.MiniBatchHeader] | None = None,
    ) -> Iterator[bytes]:
        """Return the raw messages of a step; read them to their end.

        `previous_hash` is the manifest of the step before, and `manifest_hash` that of the
        `num_mini_batches` of this step so far; the batcher refuses others. It begins after these
        and the bytes of `arrival`, unless it is of an older release.
        """
        request = wire.GetRequest(
            **self._identity(),
            step=step,
            dp_rank=self.dp_rank,
            dp_world_size=self.dp_world_size,
            wait_s=wait_s,
            observer=self._observer,
            previous_hash=previous_hash,
            manifest_hash=manifest_hash,
            first_mini_batch=num_mini_batches,
            first_byte=0 if arrival is None else arrival.num_filled,
            content_hash="" if arrival is None else arrival.header.content_hash,
            reads_xxh3=True,
        )
        return self.replicas.get(_path("Get"), request)

    def end_failed_get(self, error: TurnstreamError, *, has_data: bool) -> None:
        """Send the next Get to another replica, unless the last one ended with an answer."""
        if _is_answer(error):
            return
        if has_data and _LATE_PING in str(error):  # the link is slow
            self.replicas.allow_slow_gets()
        self.replicas.end_get(skips=True)

    def _identity(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "session_epoch": self._session_epoch,
            "session": self._session,
        }

    def observed(self, step: int) -> None:
        """Report that the observer has seen every batch up to `step`."""
        what = f"step {step} as seen"
        self._repeat("Observed", what, run=self.run, observer=self._observer, step=step)

    def stepped(self, step: int, *, manifest_hash: str) -> wire.SteppedReply:
        """Acknowledge the next step for this rank."""
        reply = self._after_lost_steps(lambda: self._stepped(step, manifest_hash))
        self._steps = (*self._steps, (step, manifest_hash))[-MAX_STEPS:]
        return reply

    def _stepped(
        self, step: int, manifest_hash: str, *, timeout_s: float | None = None
    ) -> wire.SteppedReply:
        fields = {"step": step, "manifest_hash": manifest_hash, "dp_rank": self.dp_rank}
        what = f"step {step} as stepped"
        return self._repeat("Stepped", what, timeout_s=timeout_s, **self._identity(), **fields)

    def committed(self, recovery_token: str) -> None:
        """Acknowledge that this rank's part of the checkpoint with this token is on disk."""
        token = checked_setting(recovery_token, field="recovery_token")
        fields = {**self._identity(), "recovery_token": token, "dp_rank": self.dp_rank}
        what = f"the checkpoint {recovery_token}"
        self._after_lost_steps(lambda: self._repeat("Committed", what, **fields))

    def _after_lost_steps(self, call: Callable[[], Result]) -> Result:
        """Return the result of a call; after a ConflictError, acknowledge again and call again.

        A restarted store may have lost the steps of its last second.
        """
        try:
            return call()
        except ConflictError:
            if not self._steps:
                raise
            self.repeat_stepped()
        return call()

    def repeat_stepped(self, *, timeout_s: float | None = None) -> None:
        """Acknowledge the newest step again, and first the steps before it that the store lost.

        Then announce the newest version again: groups may wait for it. A call that the store still
        has changes nothing. Nor does a version below one that another thread has announced in the
        meantime. `timeout_s` limits each call.
        """
        lost: list[tuple[int, str]] = []
        for step, manifest_hash in reversed(self._steps):
            try:
                self._stepped(step, manifest_hash, timeout_s=timeout_s)
                break
            except ConflictError:
                lost.append((step, manifest_hash))
        for step, manifest_hash in reversed(lost):
            self._stepped(step, manifest_hash, timeout_s=timeout_s)
        if self._announced is not None:
            with contextlib.suppress(ConflictError):
                self._announce(self._announced, timeout_s=timeout_s)

    def announce_version(self, version: int, *, step: int, weights_uri: str) -> None:
        """Announce new weights."""
        uri = checked_setting(weights_uri, field="weights_uri")
        fields: dict[str, Any] = {"version": version, "step": step, "weights_uri": uri}
        self._announce(fields)
        self._announced = fields

    def _announce(self, fields: dict[str, Any], *, timeout_s: float | None = None) -> None:
        what = f"policy version {fields['version']}"
        self._repeat("AnnounceVersion", what, timeout_s=timeout_s, **self._identity(), **fields)

    def close(self) -> None:
        """Close all connections; calls in flight end as cancelled."""
        self.replicas.close()
        self._closed.set()

    def _repeat(
        self, method: str, what: str, *, timeout_s: float | None = None, **fields: Any
    ) -> Any:
        """Return the first reply to a request with these fields.

        Raises the last error after `timeout_s`; `what` names the call in it.
        """
        self.process.require()
        request: Message = getattr(wire, f"{method}Request")(**fields)
        reply: type[Message] = getattr(wire, f"{method}Reply")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        least_s = min(LEAST_ATTEMPT_S, timeout_s / 4)
        began_s = answered_s = now_s = time.monotonic()
        deadline_s = began_s + timeout_s
        num_failures = 0
        warnings = WaitWarnings()
        while True:
            address = self.replicas.current
            call = self.replicas.channel(address).unary_unary(
                _path(method),
                request_serializer=type(request).SerializeToString,
                response_deserializer=reply.FromString,
            )
            try:
                attempt_s = max(0.01, min(ATTEMPT_S, deadline_s - now_s))
                return call(request, timeout=attempt_s, metadata=self.replicas.metadata)
            except grpc.RpcError as rpc_error:
                error = error_of(rpc_error)
            now_s = time.monotonic()
            if _is_answer(error):
                answered_s = now_s
            else:
                self.replicas.skip(address)
            num_failures += 1
            delay_s = retry_delay_s(error, num_failures=num_failures)
            if delay_s is None or now_s + delay_s + least_s >= deadline_s:
                if not isinstance(error, UnavailableError):
                    raise error
                wanted = not_acknowledged(what, waited_s=now_s - began_s)
                why = reasons_of(error, target=self.target, since_s=now_s - answered_s)
                raise type(error)(error.message, [wanted, *why]) from error
            if warnings.is_due(now_s - began_s):
                _logger.warning("%s is not acknowledged by %s: %s", what, self.target, error)
            self._closed.wait(delay_s)
            now_s = time.monotonic()


def error_of(error: grpc.RpcError) -> TurnstreamError:
    """Return the Turnstream error of a failed call; only a batcher reports a NotReadyError."""
    call = cast("grpc.Call", error)
    code, details = call.code(), call.details() or ""
    if code in NO_ANSWER and not details.startswith("{"):
        found: TurnstreamError = BatcherUnavailableError(details or code.name)
    else:
        found = status_to_error(code.name, details)
    found.__cause__ = error
    return found


def _is_answer(error: TurnstreamError) -> bool:
    return not isinstance(error, BatcherUnavailableError) or bool(error.reasons)


def reasons_of(error: TurnstreamError, *, target: str, since_s: float) -> list[WaitReason]:
    """Return why a call failed: the reasons of the batcher, or why it sent none.

    `since_s` are the seconds since the last answer of `target`, or the first call.
    """
    if isinstance(error, UnavailableError) and error.reasons:
        return list(error.reasons)
    cause = error.__cause__
    is_silent = isinstance(cause, grpc.RpcError) and cast("grpc.Call", cause).code() in _SILENT
    return [batcher_away(address=target, since_s=since_s, why=None if is_silent else str(error))]


def retry_delay_s(error: TurnstreamError, *, num_failures: int) -> float | None:
    """Return the seconds before a retry; None where the same call can never succeed."""
    if isinstance(error, RejectedError):
        return error.retry_after_s
    if isinstance(error, NotReadyError):
        return min(RANK_DELAY_S, pause_after(num_failures))
    if isinstance(error, UnavailableError):
        return pause_after(num_failures)
    return None


def _path(method: str) -> str:
    return f"/turnstream.wire.v1.Batches/{method}"
