"""What a batcher process is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from turnstream_server.batcher.planner.parking import PARK_AFTER_S
from turnstream_server.batcher.planner.upkeep import DEFAULT_UPKEEP, Upkeep


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherOptions:
    """Settings of one batcher replica.

    Attributes:
        redis_url: the store.
        listen: host:port of the gRPC server; port 0 takes a free one.
        advertise: "host:port" or "host" at which workers reach this replica; "" for the address
            that it listens on, or the name of this machine where it listens on all addresses.
        address_file: where the bound "host:port" is written once the server answers; None
            writes it nowhere.
        get_wait_max_s: longest a Get may wait for its batch, whatever it asks for.
        leader_lease_s: a planner that dies is replaced after at most this long.
        park_after_s: a run that has had no news for so long, and in which nothing can expire, is
            parked: it costs nothing until something is written to it.
        cache_bytes: payload, rows and encoded mini-batches kept in memory, least recently used
            dropped first. One mini-batch that is larger is still served.
        upkeep: how the runs that it leads are kept small.
        shutdown_grace_s: how long calls in progress may go on after a stop was asked for.
    """

    redis_url: str
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    address_file: Path | None = None
    get_wait_max_s: float = 60.0
    leader_lease_s: float = 5.0
    park_after_s: float = PARK_AFTER_S
    cache_bytes: int = 1 << 30
    upkeep: Upkeep = DEFAULT_UPKEEP
    shutdown_grace_s: float = 2.0
