"""The release of payload in one call, as the releaser of a batcher makes it in two."""

from __future__ import annotations

from collections.abc import Container, Sequence

import redis.asyncio

from turnstream_server.bus.release.release import give_back, remove_payload


async def release_payload(
    client: redis.asyncio.Redis,
    run: str,
    trajectory_ids: Sequence[str],
    *,
    lease_s: float = 60.0,
    abandoned: Container[str] = (),
) -> None:
    """Remove the payload of ended trajectories, and return its bytes to the budget."""
    await remove_payload(client, run, trajectory_ids, lease_s=lease_s, abandoned=abandoned)
    await give_back(client, run, trajectory_ids)
