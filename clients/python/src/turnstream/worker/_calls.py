"""The calls of `turnstream.wire.v1.Batches`, with errors of ours and bounded repetition."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message
from grpc.experimental import ChannelOptions

from turnstream.errors import (
    BatcherUnavailableError,
    RejectedError,
    TurnstreamError,
    UnavailableError,
)
from turnstream.records.statuses import status_to_error
from turnstream.types.names import checked_setting
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream.worker._reasons import (
    ended,
    is_answer,
    is_silence,
    not_acknowledged,
    of_failure,
)

ATTEMPT_S = 30.0
"""Longest a single acknowledging call may take before it is made again."""

LEAST_ATTEMPT_S = 1.0
"""Who has not answered within less, because the deadline came, need not be silent."""

FIRST_DELAY_S = 0.05
MAX_DELAY_S = 2.0

_CHANNEL_OPTIONS = (
    # Without it, the events of a stream go through a thread of the channel, and a stream that
    # begins while its server stops can hang for ever, beyond its deadline and beyond `cancel`.
    # With it, a stream that is cancelled keeps its connection open: see `hang_up`.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
    ("grpc.max_receive_message_length", -1),
    # A restarted batcher should be found within a second or two, not after minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
)

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Whose data is asked for: one rank's share of a run, of its trainer or of an observer."""

    run: str
    dp_rank: int
    dp_world_size: int
    observer: str = ""


def backoff_s(num_failures: int) -> float:
    """Seconds to wait after the n-th failure in a row, from 1: 0.05, 0.1, .. 2."""
    return min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(num_failures - 1, 10))


def error_of(error: grpc.RpcError) -> TurnstreamError:
    """The error of ours that a failed call stands for.

    A deadline that passed on this side says that nobody answered, not that data is missing: only
    a batcher's own words make a NotReadyError.
    """
    call = cast("grpc.Call", error)
    code, details = call.code(), call.details() or ""
    if code in _TRANSPORT_CODES and not details.startswith("{"):
        found: TurnstreamError = BatcherUnavailableError(details or code.name)
    else:
        found = status_to_error(code.name, details)
    found.__cause__ = error
    return found


_TRANSPORT_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


class BatcherCalls:
    """One connection to a batcher for one share; every call is safe to make twice."""

    def __init__(self, target: str, *, share: Share, timeout_s: float) -> None:
        checked_setting(share.run, field="run")
        checked_setting(share.observer, field="observer")
        self.target = target
        self.share = share
        self._timeout_s = timeout_s
        self._session_epoch = 0
        self._session = ""
        self._closed = threading.Event()
        self._channel = _open_channel(target)
        self._start = self._unary("Start", wire.StartReply)
        self._stepped = self._unary("Stepped", wire.SteppedReply)
        self._committed = self._unary("Committed", wire.CommittedReply)
        self._announce = self._unary("AnnounceVersion", wire.AnnounceVersionReply)
        self._observe = self._unary("Observe", wire.ObserveReply)
        self._observed = self._unary("Observed", wire.ObservedReply)
        self._get_lock = threading.Lock()
        self._get_channel = _open_channel(target)

    def start(self, *, recovery_token: str, session: str) -> wire.StartReply:
        """Begin a session, or the same one again; later calls carry its epoch."""
        request = wire.StartRequest(
            run=self.share.run,
            recovery_token=checked_setting(recovery_token, field="recovery_token"),
            dp_world_size=self.share.dp_world_size,
            session=checked_setting(session, field="session"),
        )
        reply = self._repeat(self._start, request, what="the beginning of a trainer session")
        self._session_epoch, self._session = reply.session_epoch, session
        return reply

    def get(
        self, step: int, *, wait_s: float, previous_hash: str = "", manifest_hash: str = ""
    ) -> Iterator[bytes]:
        """Ask for a step; gives the raw messages, to be read to their end.

        It must follow the manifest that was delivered before it, and be made from the one that a
        part of it was delivered from, where these are known.

        The call has no deadline of its own: a full queue may pause it.

        Raises:
            RejectedError: this was closed.
        """
        request = wire.GetRequest(
            run=self.share.run,
            step=step,
            dp_rank=self.share.dp_rank,
            dp_world_size=self.share.dp_world_size,
            session_epoch=self._session_epoch,
            wait_s=wait_s,
            observer=self.share.observer,
            session=self._session,
            previous_hash=previous_hash,
            manifest_hash=manifest_hash,
        )
        with self._get_lock:
            if self._closed.is_set():
                raise RejectedError("the stream was closed")
            # Raw bytes out: turnstream.worker._frames strips the framing without a copy.
            call = self._get_channel.unary_stream(
                _path("Get"), request_serializer=wire.GetRequest.SerializeToString
            )
            return cast("Iterator[bytes]", call(request))

    def hang_up(self) -> None:
        """End the Get that runs, from another thread; the next one begins on a new channel.

        Closing its channel ends it for certain and gives its connection back.
        """
        with self._get_lock:
            self._get_channel.close()
            if not self._closed.is_set():
                self._get_channel = _open_channel(self.target)

    def observe(self, *, first_step: int, expiry_s: float) -> wire.ObserveReply:
        """Declare the observer of this share, or come back as it."""
        request = wire.ObserveRequest(
            run=self.share.run,
            observer=self.share.observer,
            first_step=first_step,
            expiry_s=expiry_s,
        )
        what = f"the beginning of observer {self.share.observer}"
        return self._repeat(self._observe, request, what=what)

    def observed(self, step: int) -> None:
        """Say that the observer has seen every batch up to `step`."""
        request = wire.ObservedRequest(run=self.share.run, observer=self.share.observer, step=step)
        self._repeat(self._observed, request, what=f"step {step} as seen")

    def stepped(self, step: int, *, manifest_hash: str, timeout_s: float | None = None) -> str:
        """Acknowledge a step; gives the recovery token as text.

        The longest wait is `timeout_s`, or that of the connection.
        """
        request = wire.SteppedRequest(
            run=self.share.run,
            step=step,
            session_epoch=self._session_epoch,
            manifest_hash=manifest_hash,
            session=self._session,
        )
        what = f"step {step} as stepped"
        return self._repeat(self._stepped, request, what=what, timeout_s=timeout_s).recovery_token

    def committed(self, recovery_token: str) -> None:
        """Say that the checkpoint with this token is on disk."""
        request = wire.CommittedRequest(
            run=self.share.run,
            recovery_token=checked_setting(recovery_token, field="recovery_token"),
            session_epoch=self._session_epoch,
            session=self._session,
        )
        self._repeat(self._committed, request, what=f"the checkpoint {recovery_token}")

    def announce_version(self, version: int, *, step: int, weights_uri: str) -> None:
        """Say that new weights exist."""
        request = wire.AnnounceVersionRequest(
            run=self.share.run,
            version=version,
            step=step,
            session_epoch=self._session_epoch,
            weights_uri=checked_setting(weights_uri, field="weights_uri"),
            session=self._session,
        )
        self._repeat(self._announce, request, what=f"policy version {version}")

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond `close`."""
        self._closed.wait(seconds)

    def close(self) -> None:
        """Give the connection back; calls in flight end as cancelled."""
        self._closed.set()
        self.hang_up()
        self._channel.close()

    def _unary(self, method: str, reply: type[Reply]) -> Callable[..., Reply]:
        return self._channel.unary_unary(
            _path(method),
            request_serializer=_serialize,
            response_deserializer=reply.FromString,  # pyright: ignore[reportAttributeAccessIssue] - protobuf's
        )

    def _repeat(
        self,
        call: Callable[..., Reply],
        request: object,
        *,
        what: str,
        timeout_s: float | None = None,
    ) -> Reply:
        """Call until it is answered or refused; the last error is raised after `timeout_s`.

        It says what was not acknowledged, and why: who is away or silent, since when. Where the
        deadline cuts the last call off too soon to tell, that is what the call before it has told.
        """
        began_s = answered_s = time.monotonic()
        deadline_s = began_s + (self._timeout_s if timeout_s is None else timeout_s)
        found: TurnstreamError | None = None
        num_failures = 0
        while True:
            attempt_s = max(0.01, min(ATTEMPT_S, deadline_s - time.monotonic()))
            try:
                return call(request, timeout=attempt_s)
            except grpc.RpcError as rpc_error:
                error = error_of(rpc_error)
            now_s = time.monotonic()
            if is_answer(error):
                answered_s = now_s
            if found is None or attempt_s >= LEAST_ATTEMPT_S or not is_silence(error):
                found = error
            num_failures += 1
            delay_s = retry_delay_s(error, num_failures=num_failures)
            if delay_s is None or now_s + delay_s >= deadline_s:
                why = of_failure(found, target=self.target, since_s=now_s - answered_s)
                reasons = [not_acknowledged(what, waited_s=now_s - began_s), *why]
                raise ended(found, reasons) from found.__cause__
            self.pause(delay_s)
            if self._closed.is_set():
                raise RejectedError("the stream was closed")


def _open_channel(target: str) -> grpc.Channel:
    return grpc.insecure_channel(target, options=_CHANNEL_OPTIONS)


def retry_delay_s(error: TurnstreamError, *, num_failures: int) -> float | None:
    """Seconds after which the same call may succeed; None where it never will."""
    if isinstance(error, RejectedError):
        return error.retry_after_s
    if isinstance(error, UnavailableError):
        return backoff_s(num_failures)
    return None


def _path(method: str) -> str:
    return f"/turnstream.wire.v1.Batches/{method}"


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
