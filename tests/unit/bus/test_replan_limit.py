"""Plans that are too large to be withdrawn at once."""

from __future__ import annotations

import pytest

from testkit.plans import manifest
from turnstream.errors import ConflictError
from turnstream_server.batcher.planner.replanning import check_size
from turnstream_server.bus.planning.replans import MAX_WITHDRAWN


def test_plans_above_the_limit_are_refused_with_the_remedy() -> None:
    one = manifest(*(f"g{number}" for number in range(MAX_WITHDRAWN // 4)), step=1)
    check_size([one, one])

    with pytest.raises(ConflictError, match=r"steps 1 to 1 have 6000 traj.*at most 4000.*fork"):
        check_size([one, one, one])
