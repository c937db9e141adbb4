"""Guards that hundreds of lives do not show when they are broken, why, and the test that does.

Each was broken in its script, and the test failed.
"""

from __future__ import annotations

from typing import Final

_HARMLESS = "what a planner that was replaced says here, its successor says as well"
_SELDOM = "two calls must meet that are far apart in nearly all lives"
_NOT_ASKED = "no process of the simulation asks for it: the code before it keeps it from that"
_SETTLED = "another guard of the same call, or the next call, refuses it as well"
_EPOCH = "the epoch of the leader, here alone"

UNSEEN: Final[dict[str, tuple[str, str]]] = {
    f"announce_revision: {_EPOCH}": (
        _HARMLESS,
        "test_revisions.py::test_only_the_leader_puts_a_revision_in_force",
    ),
    f"end_unheld: {_EPOCH}": (
        _HARMLESS,
        "test_endings.py::test_only_the_leader_ends_what_nobody_holds",
    ),
    f"forget_observers: {_EPOCH}": (
        _HARMLESS,
        "test_observers.py::test_only_the_planner_that_leads_forgets",
    ),
    f"keep_clock: {_EPOCH}": (_HARMLESS, "test_clock.py::test_only_the_leader_keeps_the_clock"),
    f"refuse_replan: {_EPOCH}": (
        _HARMLESS,
        "replans/test_requests.py::test_only_a_leader_refuses_a_request_and_only_the_one_that_stands",
    ),
    f"settle_members: {_EPOCH}": (
        _HARMLESS,
        "test_groups.py::test_only_the_leader_settles_members",
    ),
    f"trim_events: {_EPOCH}": (_HARMLESS, "test_release.py::test_only_the_leader_trims_events"),
    f"withdraw_plans: {_EPOCH}": (
        _SETTLED,
        "replans/test_withdrawals.py::test_nothing_is_written_where_the_store_has_something_else",
    ),
    "announce_revision: the step before is planned": (
        _NOT_ASKED,
        "test_revisions.py::test_a_revision_is_not_in_force_before_the_step_before_it_is_planned",
    ),
    "finish_run: once": (
        _NOT_ASKED,
        "test_endings.py::test_the_end_is_told_once_behind_the_last_event",
    ),
    "finish_run: a run that is open": (
        _SETTLED,
        "test_endings.py::test_a_run_that_is_open_has_no_end",
    ),
    "end_unheld: a run that is open": (
        _NOT_ASKED,
        "test_endings.py::test_in_a_run_that_is_open_somebody_may_begin_what_is_left",
    ),
    "fork_run: versions of the origin": (
        "a fork that lives when its origin has ended knows all versions of it",
        "test_forks.py::test_a_version_of_the_origin_is_never_announced_again",
    ),
    "observed: one that was forgotten": (
        "it goes on with what was kept, or is told so by the next call",
        "test_observers.py::test_a_silent_observer_is_forgotten_and_told_so",
    ),
    "hear_rank: what the store has lost": (
        _SETTLED,
        "test_ranks.py::test_a_rank_with_another_batch_ends_the_session_for_all",
    ),
    "hear_rank: a plan that was withdrawn": (
        _SELDOM,
        "test_ranks.py::test_a_batch_that_was_lost_before_it_is_sent_costs_no_session",
    ),
    "hear_rank: steps that are released": (
        _SELDOM,
        "test_ranks.py::test_a_late_word_of_a_released_step_changes_nothing",
    ),
    "stepped: a rank that was not heard": (
        _SELDOM,
        "test_ranks.py::test_a_step_is_acknowledged_once_every_rank_is_known_to_have_it",
    ),
    "stepped: what follows": (
        _NOT_ASKED,
        "test_acknowledgements.py::test_a_step_cannot_be_left_out",
    ),
    "start_session: what ranks of the one before had": (
        _SELDOM,
        "test_ranks.py::test_what_the_ranks_of_a_session_before_had_does_not_count",
    ),
    "start_session: what the one before had lost": (
        _SELDOM,
        "test_ranks.py::test_another_session_goes_on_where_one_was_lost",
    ),
    "start_session: the same again": (
        "a repeat begins the session once more, with another epoch, of which its caller is told",
        "test_sessions.py::test_all_ranks_that_start_the_same_session_get_the_same_epoch",
    ),
    "start_session: it has gone on": (
        _NOT_ASKED,
        "test_sessions.py::test_a_session_name_cannot_be_used_for_a_second_start",
    ),
    "start_session: another lineage": (
        "plans name the lineage of the run, whichever it is",
        "test_sessions.py::test_every_rollback_names_a_new_lineage",
    ),
    "keep_clock: never goes back": (
        _HARMLESS,
        "test_clock.py::test_a_tick_that_comes_late_sets_nothing_back",
    ),
    "note_damage: a step that is stepped": (
        _SETTLED,
        "replans/test_requests.py::test_damage_of_a_stepped_step_is_not_noted",
    ),
    "note_damage: a plan that was withdrawn": (
        _SETTLED,
        "replans/test_withdrawals.py::test_damage_is_noted_of_a_plan_that_stands_and_is_forgotten_with_it",
    ),
    "request_replan: one at a time": (
        "there is one who asks",
        "replans/test_requests.py::test_one_request_stands_and_whoever_asks_the_same_waits_for_its_answer",
    ),
    "refuse_replan: the request that stands": (
        _SELDOM,
        "replans/test_requests.py::test_only_a_leader_refuses_a_request_and_only_the_one_that_stands",
    ),
    "withdraw_plans: once": (
        _SETTLED,
        "replans/test_withdrawals.py::test_withdrawing_again_changes_nothing",
    ),
    "withdraw_plans: the request that stands": (
        _SETTLED,
        "replans/test_withdrawals.py::test_nothing_is_written_where_the_store_has_something_else",
    ),
}
"""Guard -> why no life shows it, and the test in tests/integration/bus."""
