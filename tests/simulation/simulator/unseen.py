"""Guards that hundreds of lives do not show when they are broken, why, and the test that does.

Each was broken in its script, and the test failed.
"""

from __future__ import annotations

from typing import Final

_HARMLESS = "what a planner that was replaced says here, its successor says as well"
_SELDOM = "two calls must meet that are far apart in nearly all lives"
_NOT_ASKED = "no process of the simulation asks for it: the code before it keeps it from that"
_SETTLED = "another guard of the same call, or the next call, refuses it as well"
_FEW = "few lives come to where it counts, and none of 150 did so that it showed"
_EPOCH = "the epoch of the leader, here alone"

UNSEEN: Final[dict[str, tuple[str, str]]] = {
    "park_leader: leases and deadlines": (
        _FEW,
        "test_parking.py::test_run_with_a_lease_is_not_parked",
    ),
    "open_group: a lease that begins in a parked run": (
        _FEW,
        "test_parking.py::test_lease_that_begins_in_a_parked_run_wakes_it",
    ),
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
        "replans/test_requests.py::test_a_second_request_joins_the_one_that_stands",
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
    "mark_dead: once": (
        _SELDOM,
        "test_groups.py::test_a_dead_trajectory_is_set_aside_and_told_to_the_plan_once",
    ),
    "mark_dead: what is sealed": (
        _NOT_ASKED,
        "test_groups.py::test_only_a_sealed_trajectory_can_die",
    ),
    "fire_deadlines: what is due": (
        _NOT_ASKED,
        "test_deadlines.py::test_a_record_of_a_deadline_that_has_not_passed_is_not_written",
    ),
    "revise_config: another was faster": (
        _SELDOM,
        "../store/test_revisions.py::test_of_two_who_revise_at_once_the_second_is_told",
    ),
    "revise_config: the same again": (
        _SELDOM,
        "../store/test_revisions.py::test_the_same_revision_again_changes_nothing_even_when_its_step_is_planned",
    ),
    "fork_run: the same again": (
        _SELDOM,
        "test_overtaken_forks.py::test_of_two_who_make_the_same_fork_at_once_both_have_it",
    ),
    "fork_run: the name is taken": (
        _SELDOM,
        "test_overtaken_forks.py::test_a_name_that_is_taken_meanwhile_stays_with_whoever_took_it",
    ),
    "inherit_records: the origin": (
        _SELDOM,
        "test_overtaken_forks.py::test_a_fork_that_is_deleted_while_it_is_made_inherits_nothing",
    ),
    "observe: one that lives goes on": (
        _FEW,
        "test_observers.py::test_an_observer_comes_back_behind_what_it_has_seen",
    ),
    "forget_observers: one that lives": (
        "it goes on with what was kept, or is told so by the next call",
        "test_observers.py::test_an_observer_that_is_late_lives_on_until_it_is_forgotten",
    ),
    "hear_rank: the epoch and the name of the session": (
        _SETTLED,
        "test_ranks.py::test_another_session_goes_on_where_one_was_lost",
    ),
    "hear_rank: a rank that has more": (
        _FEW,
        "test_ranks.py::test_a_rank_that_has_a_later_batch_has_those_before_it",
    ),
    "withdraw_plans: a step that is stepped": (
        _FEW,
        "replans/test_withdrawals.py::test_nothing_is_withdrawn_of_a_step_that_was_stepped_meanwhile",
    ),
    "withdraw_plans: the plans that were looked at": (
        _FEW,
        "replans/test_withdrawals.py::test_nothing_is_withdrawn_where_one_of_the_plans_is_another",
    ),
    "withdraw_plans: the session is over": (
        _FEW,
        "replans/test_withdrawals.py::test_a_session_that_ended_with_its_plans_is_told_so_until_another_begins",
    ),
    "withdraw_plans: groups that a config counts": (
        _FEW,
        "../batcher/replanning/test_groups.py::test_a_short_step_that_is_planned_again_counts_in_the_capacity_as_it_is_now",
    ),
    "withdraw_plans: a config begins with them": (
        _FEW,
        "../batcher/replanning/test_groups.py::test_steps_of_two_configs_are_planned_again_by_the_later_one",
    ),
    "withdraw_plans: what observers have seen": (
        _FEW,
        "replans/test_withdrawals.py::test_an_observer_goes_back_to_the_first_step_that_is_withdrawn",
    ),
    "save_snapshot: a later one": (
        _FEW,
        "test_release.py::test_a_snapshot_that_comes_late_replaces_no_later_one",
    ),
    "save_snapshot: plans that were withdrawn": (
        _FEW,
        "replans/test_withdrawals.py::test_a_snapshot_from_before_that_comes_late_brings_no_plan_back",
    ),
    "settle_eval: once": (
        _FEW,
        "test_evals.py::test_ending_an_evaluation_again_changes_nothing",
    ),
    "settle_eval: a group that evaluates": (
        _NOT_ASKED,
        "test_evals.py::test_a_group_for_training_is_never_evaluated",
    ),
    "grant_refill: a group that is over": (
        _FEW,
        "test_deadlines.py::test_a_refill_opens_a_decided_group_again_and_never_one_that_is_over",
    ),
    "grant_refill: one follows the other": (
        _NOT_ASKED,
        "test_deadlines.py::test_refills_are_granted_in_order",
    ),
    "release_payload: once": (
        "whoever writes late is refused by the second tombstone as by the first",
        "test_release.py::test_a_tombstone_stays_as_it_was_when_the_payload_is_released_again",
    ),
    "finish_batch: what is released": (
        _NOT_ASKED,
        "test_folded_batches.py::test_a_released_step_beyond_the_floor_cannot_be_replaced",
    ),
    "write_manifest: steps without a gap": (
        _NOT_ASKED,
        "test_manifests.py::test_a_step_cannot_be_left_out",
    ),
    "announce_revision: leases that become shorter": (
        "few lives lower it so far while somebody holds a lease and nothing else goes wrong",
        "test_revisions.py::test_leases_that_become_shorter_stay_until_every_living_writer_was_told",
    ),
    "give_up: a time that the clock has yet to reach": (
        _SELDOM,
        "test_leases.py::test_a_lease_that_was_renewed_after_the_clock_was_set_back_is_kept",
    ),
    "list_lapsed: a time that the clock has yet to reach": (
        "three lives of four thousand do: the clock must go back just then",
        "test_leases.py::test_a_living_writers_lease_has_not_ended_by_a_time_that_the_clock_has_yet_to_reach",
    ),
    "reopen_task: a prompt that goes on as an earlier group": (
        "a cut must take the end of a group, and its reward come before its end is told again",
        "../generator/test_forgotten_tasks.py::test_a_task_is_refused_where_the_store_forgot_that_the_group_before_had_ended",
    ),
    "open_group: what was open before needs no room": (
        _SELDOM,
        "../store/test_budget.py::test_a_group_that_was_open_before_needs_no_room_again",
    ),
    "settle_group: a cut that comes late": (
        _SELDOM,
        "test_deadlines.py::test_a_cut_that_comes_after_a_refill_was_granted_ends_nothing",
    ),
    "post_reward: what its deadline has ended": (
        _SELDOM,
        "test_late_rewards.py::test_a_reward_behind_its_deadline_is_late_before_anybody_has_folded_that_in",
    ),
    "write_manifest: the config in force": (
        "a leader plans with the config that it has put in force itself",
        "test_revisions.py::test_a_plan_made_with_a_config_that_is_not_in_force_is_refused",
    ),
    "write_manifest: a name once": (
        _NOT_ASKED,
        "test_manifests.py::test_a_manifest_that_names_a_trajectory_twice_is_refused",
    ),
    "write_manifest: a group that is over": (
        _NOT_ASKED,
        "test_folded_ends.py::test_a_group_that_is_gone_is_not_planned",
    ),
}
"""Guard -> why no life shows it, and the test, from tests/integration/bus on."""
