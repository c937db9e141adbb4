"""Plans that are too large to be withdrawn at once."""

from __future__ import annotations

import pytest

from testkit import config
from testkit.plans import manifest
from turnstream.errors import ConflictError
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.replanning import MAX_WITHDRAWN, plans_of


def test_plans_above_the_limit_are_refused_with_the_remedy() -> None:
    names = [f"g{number}" for number in range(MAX_WITHDRAWN // 2 + 1)]
    batches = [
        PlannedBatch(manifest=manifest(*some), manifest_hash="", config=config(2))
        for some in (names[:-1], names[-1:])
    ]
    assert len(plans_of(batches[:1])) == MAX_WITHDRAWN

    with pytest.raises(ConflictError, match=r"4002 traj.* from step 1 on.*at most 4000.*fork"):
        plans_of(batches)
