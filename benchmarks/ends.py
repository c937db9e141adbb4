"""How trajectories end untrained, and what generators say of it."""

from __future__ import annotations

import random
import uuid

WRITERS = [f"rollout-{n}.pool-b:{812 + 7 * n}:{n * 2_654_435_761 % 2**32:08x}" for n in range(64)]


def ends_of(step: int, groups: list[str], *, group_size: int) -> dict[str, str]:
    """Return reasons: equal rewards for two groups in five, a separate reason for each other."""
    rng = random.Random(f"ends of {step}")
    ends: dict[str, str] = {}
    for group in groups:
        is_filtered = rng.random() < 0.4
        for sample in range(group_size):
            end = "filtered:all rewards are equal" if is_filtered else f"abandoned:{_reason(rng)}"
            ends[f"{group}/{sample}/0"] = end
    return ends


def _reason(rng: random.Random) -> str:
    """Return a generator's reason: an expired lease, or an exception with a unique id."""
    request = rng.randbytes(8).hex()
    container = uuid.UUID(bytes=rng.randbytes(16))
    return rng.choice(
        (
            f"the lease of {rng.choice(WRITERS)} ended",
            f"TimeoutError: judge did not answer in 30 s (request {request})",
            f"RuntimeError: container {container} exited with status {rng.choice((1, 137))}",
        )
    )
