"""Start options of a batcher process."""

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
            that it listens on, or the name of this machine if it listens on all addresses.
        address_file: file for the bound "host:port", written once the server answers; None for
            none.
        get_wait_max_s: longest wait of a Get for its batch.
        leader_lease_s: longest time until a dead planner is replaced.
        park_after_s: seconds without news after which a run is parked, if nothing in it can expire.
            A parked run costs nothing until something is written to it.
        cache_bytes: limit of payload, rows and encoded mini-batches in memory, least recently used
            dropped first. One mini-batch that is larger is still served.
        upkeep: settings of the release of the runs that it leads.
        shutdown_grace_s: time for calls in progress after a request to stop.
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
