"""The batcher replicas that a stream may call, with a channel of its own for each address."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, cast

import grpc
from google.protobuf.message import Message
from grpc.experimental import ChannelOptions

from turnstream.errors import (
    InvalidConfigError,
    RejectedError,
    TurnstreamError,
    UnavailableError,
)
from turnstream.store.client.api_keys import METADATA, own_key, root_certificates
from turnstream.store.client.backoff import pause_after
from turnstream.store.run.batchers import SECURE, Target

_logger = logging.getLogger(__name__)

KEEPALIVE_EVERY_S = 2.0
"""Interval of pings during a call. The answer to a ping needs no store and no Python, so a replica
that waits for its store still answers."""

KEEPALIVE_WITHIN_S = 4.0
"""Limit for the answer to a ping. Later, calls to the replica fail, and other replicas get them.
Only this detects frozen processes and dead machines."""

LONGEST_KEEPALIVE_S = 256.0
"""The largest limit. On a slow link, the answer to a ping waits until the bytes before it have
arrived: see `Replicas.allow_slow_gets`."""

_SLOWER: Final = 4.0

ALIVE_WITHIN_S = 4.0
"""Limit for the first health check of a replica."""

_FIND_EVERY_S: Final = 1.0
"""Shortest time between two reads of the addresses."""

_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)

_CHANNEL_OPTIONS = (
    # Without it, a stream that begins while its server stops can hang without end, beyond its
    # deadline and `cancel`. With it, a cancelled stream keeps its connection open: see
    # `Replicas.end_get`.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
    # A new channel must not reuse the connection of a silent one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    # A restarted batcher should be found within a second or two, not after minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_EVERY_S * 1000)),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a Get may wait for minutes
)


_ADDRESS: Final = re.compile(
    r"(?:unix|unix-abstract|vsock|dns|xds):.+|(?:grpcs://)?(?!redis)[^/]+:\d+"
)
"""The forms of gRPC with a scheme, or host:port."""


def addresses_of(target: str) -> tuple[str, ...]:
    """Return the addresses in a target, each as a target of gRPC.

    >>> addresses_of("batcher:7600"), addresses_of("unix:/run/batcher.sock")
    (('batcher:7600',), ('unix:/run/batcher.sock',))
    >>> addresses_of("one:7600, two:7600")
    ('one:7600', 'two:7600')
    >>> addresses_of("grpcs://batcher:7600")
    ('grpcs://batcher:7600',)
    >>> addresses_of("ipv4:10.0.0.1:7600,10.0.0.2:7600")
    ('ipv4:10.0.0.1:7600', 'ipv4:10.0.0.2:7600')
    """
    scheme = next((each for each in ("ipv4:", "ipv6:") if target.startswith(each)), "")
    addresses = [address.strip() for address in target.removeprefix(scheme).split(",")]
    for address in addresses:
        if not _ADDRESS.fullmatch(address):
            is_store = address.startswith(("redis:", "rediss:"))
            why = "is the address of a store, not of a batcher" if is_store else "has no port"
            why = "has an empty address" if not address else why
            raise InvalidConfigError(
                "target", f"{target!r} {why}: write HOST:PORT, such as 127.0.0.1:7600"
            )
    return tuple(scheme + address for address in addresses)


class Replicas:
    """The replica to call, and the next one if it does not answer. Thread-safe.

    Short calls share one channel for each address. Gets have a channel of their own. A function as
    `target` is called again after none of its addresses has answered.

    Attributes:
        target: the present addresses, with commas between them.
        current: address of the replica to call.
        metadata: metadata of each call, with the key.
    """

    def __init__(
        self, target: Target, *, api_key: str | None = None, timeout_s: float = 0.0
    ) -> None:
        if isinstance(target, str):
            self._find, self.target = None, target
        else:
            self._find, self.target = target, _first_addresses(target, timeout_s=timeout_s)
        self._addresses = addresses_of(self.target)
        self.current = self._addresses[0]
        self._may_find_s = 0.0
        key = own_key(api_key)
        self.metadata = ((METADATA, key),) if key else ()
        self._channels: dict[str, grpc.Channel] = {}
        self._get_channel: grpc.Channel | None = None
        self._get_address = ""
        self._get_ping_s = KEEPALIVE_WITHIN_S
        self._is_alive = False  # whether the replica has answered on the channel for Gets
        self._is_closed = False
        self._lock = threading.Lock()

    def skip(self, address: str) -> None:
        """Change to the next replica, unless another thread has skipped this one already.

        After the last one, the addresses are read again, where `target` is a function.
        """
        with self._lock:
            if self.current != address:
                return
            index = (self._addresses.index(address) + 1) % len(self._addresses)
            self.current = self._addresses[index]
            is_due = time.monotonic() >= self._may_find_s and not self._is_closed
        if index == 0 and is_due and self._find is not None:
            self._find_addresses(self._find)

    def channel(self, address: str) -> grpc.Channel:
        """Return the channel of an address for short calls, shared by all threads."""
        with self._lock:
            self._raise_if_closed()
            if address not in self._channels:
                self._channels[address] = _open_channel(address)
            return self._channels[address]

    def get(
        self, path: str, request: Message, *, timeout_s: float | None = None
    ) -> Iterator[bytes]:
        """Return the raw messages of a Get at a replica that has answered; for one thread.

        `timeout_s` limits the time until the last message.
        """
        while True:
            with self._lock:
                self._raise_if_closed()
                channel = self._current_get_channel()
                if self._is_alive:
                    call = channel.unary_stream(
                        path, request_serializer=type(request).SerializeToString
                    )
                    messages = call(request, timeout=timeout_s, metadata=self.metadata)
                    return cast("Iterator[bytes]", messages)
                # A stream must not be the first call of a channel: if its attempt to connect
                # fails, the socket stays open, also after the channel is closed.
                check = channel.unary_unary(_HEALTH_CHECK).future(b"", timeout=ALIVE_WITHIN_S)
            error = check.exception()
            if isinstance(error, grpc.RpcError) and cast("grpc.Call", error).code() in NO_ANSWER:
                raise error
            with self._lock:
                self._is_alive = channel is self._get_channel

    def end_get(self, *, skips: bool = False) -> None:
        """End the present Get, also from another thread; `skips` the replica in the next one."""
        with self._lock:  # only a closed channel ends a call for certain, and its connection
            self._close_get()
        if skips:
            self.skip(self._get_address)

    def allow_slow_gets(self) -> None:
        """Raise the limit for answers to the pings of further Gets, whose link is slow."""
        with self._lock:
            self._get_ping_s = min(LONGEST_KEEPALIVE_S, _SLOWER * self._get_ping_s)

    def close(self) -> None:
        """Close all channels. Their calls end as cancelled."""
        with self._lock:
            self._is_closed = True
            self._close_get()
            for channel in self._channels.values():
                channel.close()

    def _find_addresses(self, find: Callable[[], Sequence[str]]) -> None:
        """Replace the addresses, if others are found. Waits for a store without the lock."""
        target, found = "", ()
        try:
            target = ",".join(find())
            found = addresses_of(target) if target else ()
        except TurnstreamError as error:
            _logger.debug("the addresses of the batchers cannot be read: %s", error)
        with self._lock:
            self._may_find_s = time.monotonic() + _FIND_EVERY_S
            if found and {*found} != {*self._addresses}:
                _logger.info("the batchers are %s, and no longer %s", target, self.target)
                self.target, self._addresses, self.current = target, found, found[0]

    def _current_get_channel(self) -> grpc.Channel:
        if self._get_channel is None or self._get_address != self.current:
            self._close_get()
            self._get_address = self.current
            self._get_channel = _open_channel(self.current, ping_s=self._get_ping_s)
        return self._get_channel

    def _close_get(self) -> None:
        if self._get_channel is not None:
            self._get_channel.close()
        self._get_channel, self._is_alive = None, False

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise RejectedError("the stream was closed")


def _first_addresses(find: Callable[[], Sequence[str]], *, timeout_s: float) -> str:
    """Return addresses with commas between them, once there is one; errors as of `Replicas`."""
    ends_s, num_failures = time.monotonic() + timeout_s, 0
    while True:
        try:
            return ",".join(find())
        except UnavailableError:
            num_failures += 1
            pause_s = pause_after(num_failures)
            if time.monotonic() + pause_s >= ends_s:
                raise
        time.sleep(pause_s)


def _open_channel(address: str, *, ping_s: float = KEEPALIVE_WITHIN_S) -> grpc.Channel:
    """Return a channel, with TLS if the address asks for it; `ping_s` limits answers to pings."""
    options = (
        *_CHANNEL_OPTIONS,
        ("grpc.keepalive_timeout_ms", int(ping_s * 1000)),
        # The timeout of a keepalive has no effect if that of all pings is longer: 60 s by default.
        ("grpc.http2.ping_timeout_ms", int(ping_s * 1000)),
    )
    if not address.startswith(SECURE):
        return grpc.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(root_certificates())
    return grpc.secure_channel(address.removeprefix(SECURE), credentials, options)
