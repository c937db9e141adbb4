"""Plans that are too large to be withdrawn at once."""

from __future__ import annotations

import pytest

from testkit.plans import manifest
from turnstream.errors import ConflictError
from turnstream_server.batcher.planner.replanning import MAX_WITHDRAWN, check_size


def test_plans_above_the_limit_are_refused_with_the_remedy() -> None:
    names = [f"g{number}" for number in range(MAX_WITHDRAWN // 2 + 1)]
    plans = [manifest(*names[:-1]), manifest(names[-1])]
    check_size(plans[:1])

    with pytest.raises(ConflictError, match=r"4002 traj.* from step 1 on.*at most 4000.*fork"):
        check_size(plans)
