"""Guards of the scripts by which a run is revised, ended, forked, planned again and observed."""

from __future__ import annotations

from simulator.breaks import Guard, script
from simulator.run_guards import LEADER, SESSION

_UNLESS = "return redis.error_reply('"

LATE_GUARDS = (
    # each check of an epoch by itself: what one lets through, another may still refuse
    *(
        Guard(f"{name}: the epoch of the leader, here alone", script(LEADER + rest, rest))
        for name, rest in (
            ("announce_revision", "\nlocal revision = tonumber(ARGV[2])\nlocal newest"),
            ("end_unheld", "\nlocal is_closed"),
            ("fire_deadlines", "\nlocal now_ms = tonumber(ARGV[2])\nlocal config"),
            ("forget_observers", "\nlocal now_ms = tonumber(ARGV[2])\nlocal next_ms"),
            ("keep_clock", "\nlocal known, at_ms"),
            ("mark_dead", "\nlocal entry = "),
            ("refuse_replan", "\nlocal standing = "),
            ("settle_members", "\nlocal num_ended = 0\n\n-- Part of"),
            (
                "trim_events",
                "\nlocal before = redis.call('HGET', KEYS[2], 'before')\nif not before",
            ),
            ("withdraw_plans", "\nlocal stepped, planned, standing, done"),
        )
    ),
    # revisions of the config
    Guard(
        "revise_config: a step that is planned",
        script("if step <= planned then", "if false then"),
        "has_reviser",
    ),
    Guard(
        "revise_config: another was faster",
        script("if last ~= tonumber(ARGV[3]) then", "if false then"),
        "has_reviser",
    ),
    Guard(
        "revise_config: the order of steps",
        script("if step < first then", "if false then"),
        "has_reviser",
    ),
    Guard(
        "revise_config: the same again",
        script("if redis.call('HGET', KEYS[2], last) == ARGV[1] then", "if false then"),
        "has_reviser",
    ),
    Guard(
        "revise_config: the first that waits",
        script("if tonumber(next_revision or 0) == 0 then", "if true then"),
        "has_reviser",
    ),
    Guard(
        "announce_revision: once",
        script("if revision > newest then", "if true then"),
        "has_reviser",
    ),
    Guard(
        "announce_revision: the step before is planned",
        script("if first_step(revision) > planned + 1 then", "if false then"),
        "has_reviser",
    ),
    Guard(
        "announce_revision: groups of the steps before",
        script("planned * (before.batch_groups - after.batch_groups) + 0", "0"),
        "has_reviser",
    ),
    Guard(
        "announce_revision: the next that waits",
        script("newest < tonumber(last or newest) and first_step(newest + 1) or 0", "0"),
        "has_reviser",
    ),
    Guard(
        "write_manifest: the config of its step",
        script("if paused or is_revised or lineage", "if paused or lineage"),
        "has_reviser",
    ),
    Guard(
        "write_manifest: the config in force",
        script("if in_force ~= ARGV[6] then", "if false then"),
    ),
    Guard(
        "write_manifest: a short step",
        script("if num_groups ~= batch_groups then", "if false then"),
    ),
    # the end of a run
    Guard(
        "reopen_run: once",
        script("if closed == '0' then\n  return 0", "if false then\n  return 0"),
        "has_reopener",
    ),
    Guard(
        "reopen_run: what was finished",
        script("redis.call('HDEL', KEYS[1], 'finished', 'leftover')\n", ""),
        "has_reopener",
    ),
    Guard("close_run: once", script("if closed == '1' then", "if false then")),
    Guard(
        "finish_run: once",
        script("if finished == '1' then\n  return 1", "if false then\n  return 1"),
    ),
    Guard(
        "finish_run: a run that is open",
        script("if closed ~= '1' or (last", "if (last"),
    ),
    Guard("end_unheld: a run that is open", script("if not is_closed or (", "if (")),
    Guard(
        "end_unheld: a refill was granted since",
        script("if refills >= 0 and refills == tonumber(ARGV[i + 1]) then", "if refills >= 0 then"),
    ),
    # forks
    Guard(
        "fork_run: the same again",
        script("if origin == ARGV[1] then\n  return 0", "if false then\n  return 0"),
        "has_forker",
    ),
    Guard(
        "fork_run: the name is taken",
        script("if redis.call('EXISTS', KEYS[1], KEYS[2]) > 0 then", "if false then"),
        "has_forker",
    ),
    Guard(
        "fork_run: versions of the origin",
        script("'version_floor', ARGV[5])", "'version_floor', -1)"),
        "has_forker",
    ),
    Guard(
        "inherit_records: the origin",
        script("if redis.call('HGET', KEYS[1], 'origin') ~= ARGV[1] then", "if false then"),
        "has_forker",
    ),
    # observers
    Guard(
        "observe: what is not retained",
        script("if tonumber(seen) < tonumber(released) then", "if false then"),
        "has_observer",
    ),
    Guard(
        "observe: one that lives goes on",
        script(
            "if not seen or expires_ms == '0' then\n  local before", "if true then\n  local before"
        ),
        "has_observer",
    ),
    Guard(
        "observed: one that was forgotten",
        script(
            f"if not seen or expires_ms == '0' then\n  {_UNLESS}EXPIRED",
            f"if not seen then\n  {_UNLESS}EXPIRED",
        ),
        "has_observer",
    ),
    Guard(
        "observed: never falls",
        script("math.max(tonumber(seen), tonumber(ARGV[2]))", "tonumber(ARGV[2])"),
        "has_observer",
    ),
    Guard(
        "forget_observers: one that lives",
        script("if expires_ms > now_ms then", "if false then"),
        "has_observer",
    ),
    # the ranks of a session
    Guard(
        "hear_rank: the epoch and the name of the session",
        script(
            SESSION
            + "if lost then\n  return redis.error_reply('BEHIND ' .. string.match(lost, ':(.*)$'))\nend\nlocal step = tonumber(ARGV[4])",
            "local step = tonumber(ARGV[4])",
        ),
    ),
    Guard(
        "hear_rank: what the store has lost",
        script("if own ~= ARGV[5] then\n  local has", "if false then\n  local has"),
    ),
    Guard(
        "hear_rank: a plan that was withdrawn",
        script("if own ~= ARGV[5] and ARGV[6] == 'gets' then", "if false then"),
    ),
    Guard(
        "hear_rank: steps that are released",
        script("if step < tonumber(released or 0) then\n  return 1", "if false then\n  return 1"),
    ),
    Guard(
        "hear_rank: a rank that has more",
        script(
            "if not newest or tonumber(newest) < step or hash_of(newest) ~= hash then\n    redis.call(",
            "if true then\n    redis.call(",
        ),
    ),
    Guard("stepped: a rank that was not heard", script("  if rank then", "  if false then")),
    Guard("stepped: what follows", script("if step > stepped + 1 then", "if false then")),
    Guard(
        "start_session: what ranks of the one before had",
        script("redis.call('DEL', KEYS[7])\n", ""),
    ),
    Guard(
        "start_session: what the one before had lost",
        script("redis.call('HDEL', KEYS[1], 'session_lost')\n", ""),
    ),
    Guard(
        "start_session: the same again",
        script("if session == ARGV[1] and session ~= '' then", "if false then"),
    ),
    Guard(
        "start_session: it has gone on",
        script("if stepped ~= tonumber(ARGV[3] == '' and 0 or ARGV[3]) then", "if false then"),
    ),
    Guard(
        "start_session: another lineage",
        script('if step ~= stepped then\n  -- "main"', 'if false then\n  -- "main"'),
    ),
    # time
    Guard(
        "keep_clock: a long gap between terms",
        script("(gap_ms >= 0 and gap_ms <= tonumber(most_ms) and gap_ms or 0)", "gap_ms"),
    ),
    Guard(
        "keep_clock: never goes back",
        script("elseif known and ms < tonumber(known) then", "elseif false then"),
    ),
    Guard(
        "fire_deadlines: what is due",
        script("if due_ms and tonumber(due_ms) <= now_ms and", "if due_ms and"),
    ),
    # damage
    Guard("mark_dead: once", script("if state == 'dead' then", "if false then")),
    Guard(
        "mark_dead: what is sealed",
        script(
            f"if state ~= 'sealed' and state ~= 'awaiting_reward' then\n  {_UNLESS}CONFLICT ' .. ARGV[2] .. ' is ' .. (entry",
            f"if false then\n  {_UNLESS}CONFLICT ' .. ARGV[2] .. ' is ' .. (entry",
        ),
    ),
    Guard(
        "note_damage: a step that is stepped",
        script(
            "if not stepped or tonumber(ARGV[1]) <= tonumber(stepped) or hash ~= ARGV[2] then",
            "if hash ~= ARGV[2] then",
        ),
    ),
    Guard(
        "note_damage: a plan that was withdrawn",
        script("<= tonumber(stepped) or hash ~= ARGV[2] then", "<= tonumber(stepped) then"),
    ),
    Guard(
        "note_trouble: the term is over",
        script("if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then", "if false then"),
    ),
    Guard(
        "request_replan: one at a time",
        script("if standing then\n  return string", "if false then\n  return string"),
    ),
    Guard(
        "refuse_replan: the request that stands",
        script("if string.match(standing, '^(.*):%d+$') ~= ARGV[2] then", "if false then"),
    ),
    Guard(
        "withdraw_plans: once",
        script("if string.match(done or '', '^([^:]*):') == ARGV[2] then", "if false then"),
    ),
    Guard(
        "withdraw_plans: the request that stands",
        script("if string.match(standing or '', '^(.*):%d+$') ~= ARGV[2] then", "if false then"),
    ),
    Guard(
        "withdraw_plans: a step that is stepped",
        script("if first <= tonumber(stepped) then", "if false then"),
    ),
    Guard(
        "withdraw_plans: the plans that were looked at",
        script(
            "if planned ~= ARGV[5] or first_hash ~= ARGV[4] or newest_hash ~= ARGV[6] then",
            "if false then",
        ),
    ),
    Guard(
        "withdraw_plans: the session is over",
        script("'session_epoch', epoch + 1,\n  'session', '',", "'session_epoch', epoch,"),
    ),
    Guard(
        "withdraw_plans: groups that a config counts",
        script("if num_groups ~= usual then", "if false then"),
    ),
    Guard(
        "withdraw_plans: a config begins with them",
        script("  if from > first then", "  if false then"),
    ),
    Guard(
        "withdraw_plans: what observers have seen",
        script("  if seen and tonumber(seen) >= first then", "  if false then"),
    ),
    Guard(
        "save_snapshot: a later one",
        script(
            "if is_later(before, ARGV[2]) or (before == ARGV[2] and step > tonumber(ARGV[3])) then",
            "if false then",
        ),
    ),
    Guard(
        "save_snapshot: plans that were withdrawn",
        script("if withdrawn_at == ARGV[2] then", "if false then"),
    ),
    # groups and what is over
    Guard(
        "settle_eval: once",
        script("if state == 'evaluated' then\n  return 0", "if false then\n  return 0"),
    ),
    Guard(
        "settle_eval: a group that evaluates",
        script("if state ~= 'evaluating' then", "if false then"),
    ),
    Guard(
        "grant_refill: a group that is over",
        script("if state ~= 'open' and state ~= 'decided' then", "if false then"),
    ),
    Guard(
        "grant_refill: one follows the other",
        script("if number > granted + 1 then", "if false then"),
    ),
    Guard("raise_floor: never falls", script("if floor <= released then", "if false then")),
    Guard(
        "release_payload: once",
        script(
            "if redis.call('HEXISTS', KEYS[2], 'released') == 1 then\n  return 0",
            "if false then\n  return 0",
        ),
    ),
    Guard(
        "finish_batch: what is released",
        script("if step ~= folded + 1 or step > released then", "if false then"),
    ),
    Guard(
        "write_manifest: steps without a gap", script("if step ~= last + 1 then", "if false then")
    ),
    Guard("write_manifest: a name once", script("    if named[id] then", "    if false then")),
    Guard(
        "write_manifest: a group that is over",
        script("      if not sizes[group] then", "      if false then"),
    ),
)
