"""The calls of `turnstream.wire.v1.Batches`, with errors of ours and bounded repetition."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message

from turnstream.errors import (
    BatcherUnavailableError,
    NotReadyError,
    RejectedError,
    TurnstreamError,
    UnavailableError,
)
from turnstream.records.statuses import status_to_error
from turnstream.store.backoff import LONGEST_PAUSE_S, pause_after
from turnstream.store.wait_warnings import WaitWarnings
from turnstream.types.names import checked_setting
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream.worker._reasons import (
    ended,
    is_answer,
    is_silence,
    not_acknowledged,
    of_failure,
)
from turnstream.worker._replicas import Replicas, check_alive, open_channel

_logger = logging.getLogger(__name__)

ATTEMPT_S = 30.0
"""Longest a single acknowledging call may take before it is made again."""

LEAST_ATTEMPT_S = 1.0
"""Who has not answered within less, because the deadline came, need not be silent."""

RANK_DELAY_S = 0.25
"""Longest pause of a rank that waits for the other ranks of its step."""

Reply = TypeVar("Reply", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Whose data is asked for: one rank's share of a run, of its trainer or of an observer."""

    run: str
    dp_rank: int
    dp_world_size: int
    observer: str = ""


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
    """The calls of one share to the batcher; every call is safe to make twice.

    A call that brings no answer of the batcher is made again to the next replica.

    Args:
        target: gRPC address of a batcher, "host:port"; several replicas with commas.
        share: whose data is asked for.
        timeout_s: longest wait for an answer.
        for_one_rank: whether acknowledgements are those of this rank, not of all ranks.
    """

    def __init__(
        self, target: str, *, share: Share, timeout_s: float, for_one_rank: bool = False
    ) -> None:
        checked_setting(share.run, field="run")
        checked_setting(share.observer, field="observer")
        self.target = target
        self.share = share
        self._timeout_s = timeout_s
        self._acknowledged_by = share.dp_rank if for_one_rank else None
        self._session_epoch = 0
        self._session = ""
        self._closed = threading.Event()
        self._replicas = Replicas(target)
        self._get_lock = threading.Lock()
        self._get_address = self._asked_address = self._replicas.current
        self._get_channel = open_channel(self._get_address)
        self._is_alive = False

    def start(self, *, recovery_token: str, session: str) -> wire.StartReply:
        """Begin a session, or the same one again; later calls carry its epoch and its run's id."""
        request = wire.StartRequest(
            run=self.share.run,
            recovery_token=checked_setting(recovery_token, field="recovery_token"),
            dp_world_size=self.share.dp_world_size,
            session=checked_setting(session, field="session"),
        )
        reply = self._repeat(
            "Start", request, wire.StartReply, what="the beginning of a trainer session"
        )
        self._session_epoch, self._session = reply.session_epoch, session
        self._keep_to(reply.run)
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
            grpc.RpcError: a replica that has not answered yet does not answer.
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
        channel = self._connected_get_channel()
        with self._get_lock:
            if self._closed.is_set():
                raise RejectedError("the stream was closed")
            # Raw bytes out: turnstream.worker._frames strips the framing without a copy.
            call = channel.unary_stream(
                _path("Get"), request_serializer=wire.GetRequest.SerializeToString
            )
            return cast("Iterator[bytes]", call(request))

    def hang_up(self) -> None:
        """End the Get that runs, from another thread; the next one begins on a new channel.

        Closing its channel ends it for certain and closes its connection.
        """
        with self._get_lock:
            self._open_get_channel()

    def leave_if_silent(self, error: TurnstreamError) -> None:
        """Send the next Get to another replica, unless the last one ended with an answer."""
        if not is_answer(error):
            self._is_alive = False
            self._replicas.leave(self._asked_address)

    def _connected_get_channel(self) -> grpc.Channel:
        """Return the channel for the next Get, to a replica that has answered."""
        with self._get_lock:
            if self._closed.is_set():
                raise RejectedError("the stream was closed")
            if self._get_address != self._replicas.current:
                self._open_get_channel()
            self._asked_address, channel = self._get_address, self._get_channel
        if not self._is_alive:
            check_alive(channel)
            self._is_alive = True
        return channel

    def _open_get_channel(self) -> None:
        self._get_channel.close()
        if not self._closed.is_set():
            self._get_address = self._replicas.current
            self._get_channel = open_channel(self._get_address)
            self._is_alive = False

    def observe(self, *, first_step: int, expiry_s: float) -> wire.ObserveReply:
        """Declare the observer of this share, or come back as it."""
        request = wire.ObserveRequest(
            run=self.share.run,
            observer=self.share.observer,
            first_step=first_step,
            expiry_s=expiry_s,
        )
        what = f"the beginning of observer {self.share.observer}"
        reply = self._repeat("Observe", request, wire.ObserveReply, what=what)
        self._keep_to(reply.run)
        return reply

    def _keep_to(self, run: str) -> None:
        """Use this run id in all later calls, also if the name belongs to another run by then."""
        if run:  # a batcher of an older release does not send it
            self.share = replace(self.share, run=run)

    def observed(self, step: int) -> None:
        """Say that the observer has seen every batch up to `step`."""
        request = wire.ObservedRequest(run=self.share.run, observer=self.share.observer, step=step)
        self._repeat("Observed", request, wire.ObservedReply, what=f"step {step} as seen")

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
            dp_rank=self._acknowledged_by,
        )
        what = f"step {step} as stepped"
        return self._repeat(
            "Stepped",
            request,
            wire.SteppedReply,
            what=what,
            timeout_s=timeout_s,
            max_delay_s=LONGEST_PAUSE_S if self._acknowledged_by is None else RANK_DELAY_S,
        ).recovery_token

    def committed(self, recovery_token: str) -> None:
        """Say that the checkpoint with this token is on disk."""
        request = wire.CommittedRequest(
            run=self.share.run,
            recovery_token=checked_setting(recovery_token, field="recovery_token"),
            session_epoch=self._session_epoch,
            session=self._session,
            dp_rank=self._acknowledged_by,
        )
        self._repeat(
            "Committed", request, wire.CommittedReply, what=f"the checkpoint {recovery_token}"
        )

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
        self._repeat(
            "AnnounceVersion", request, wire.AnnounceVersionReply, what=f"policy version {version}"
        )

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond `close`."""
        self._closed.wait(seconds)

    def close(self) -> None:
        """Close all connections; calls in flight end as cancelled."""
        self._closed.set()
        self.hang_up()
        self._replicas.close()

    def _unary(self, method: str, reply: type[Reply], address: str) -> Callable[..., Reply]:
        return self._replicas.channel(address).unary_unary(
            _path(method), request_serializer=_serialize, response_deserializer=reply.FromString
        )

    def _repeat(
        self,
        method: str,
        request: Message,
        reply: type[Reply],
        *,
        what: str,
        timeout_s: float | None = None,
        max_delay_s: float = LONGEST_PAUSE_S,
    ) -> Reply:
        """Call until it is answered or refused; the last error is raised after `timeout_s`.

        It says what was not acknowledged, and why: who is away or silent, since when. Where the
        deadline cuts the last call off too soon to tell, that is what the call before it has told.
        """
        began_s = answered_s = time.monotonic()
        deadline_s = began_s + (self._timeout_s if timeout_s is None else timeout_s)
        found: TurnstreamError | None = None
        num_failures = 0
        warnings = WaitWarnings()
        while True:
            attempt_s = max(0.01, min(ATTEMPT_S, deadline_s - time.monotonic()))
            address = self._replicas.current
            try:
                return self._unary(method, reply, address)(request, timeout=attempt_s)
            except grpc.RpcError as rpc_error:
                error = error_of(rpc_error)
            now_s = time.monotonic()
            if is_answer(error):
                answered_s = now_s
            else:
                self._replicas.leave(address)
            if found is None or attempt_s >= LEAST_ATTEMPT_S or not is_silence(error):
                found = error
            num_failures += 1
            delay_s = retry_delay_s(error, num_failures=num_failures)
            if isinstance(error, NotReadyError):
                delay_s = min(delay_s or 0.0, max_delay_s)
            if delay_s is None or now_s + delay_s >= deadline_s:
                why = of_failure(found, target=self.target, since_s=now_s - answered_s)
                reasons = [not_acknowledged(what, waited_s=now_s - began_s), *why]
                raise ended(found, reasons) from found.__cause__
            if warnings.is_due(now_s - began_s):
                _logger.warning("%s is not acknowledged by %s: %s", what, self.target, found)
            self.pause(delay_s)
            if self._closed.is_set():
                raise RejectedError("the stream was closed")


def retry_delay_s(error: TurnstreamError, *, num_failures: int) -> float | None:
    """Seconds after which the same call may succeed; None where it never will."""
    if isinstance(error, RejectedError):
        return error.retry_after_s
    if isinstance(error, UnavailableError):
        return pause_after(num_failures)
    return None


def _path(method: str) -> str:
    return f"/turnstream.wire.v1.Batches/{method}"


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
