"""Guards of the scripts, each with the edit that breaks it."""

from __future__ import annotations

from simulator.breaks import Guard, script

_LEADER = (
    "if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then\n"
    "  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])\nend"
)
_SESSION = "if refusal then\n  return refusal\nend\n"
_IS_OPEN = (
    "if state == 'open' and (rest == epoch .. writer\n"
    "      or writer == '' and string.match(rest, '^%d+') == epoch) then"
)

SCRIPT_GUARDS = (
    *(
        Guard(f"{name}: the epoch of the leader, here alone", script(_LEADER + rest, rest))
        for name, rest in (
            ("write_manifest", "\nlocal step = tonumber(ARGV[2])\nlocal last"),
            ("give_up", "\nlocal time = redis.call('TIME')"),
            ("advance_watermark", "\nlocal stepped, released, checkpoints"),
            ("finish_run", "\nlocal closed, finished"),
        )
    ),
    Guard(
        "append: the epoch of the writer",
        script("if holder and holder ~= epoch and not (", "if false and ("),
    ),
    Guard(
        "append: a turn that is stored already",
        script("local num_known = math.min(turns - first, num_turns)", "local num_known = 0"),
    ),
    Guard(
        "append: the tombstone of a released trajectory",
        script(
            "if released then\n  return redis.error_reply('FENCED [released] the trajectory is finished",
            "if false then\n  return redis.error_reply('FENCED [released] the trajectory is finished",
        ),
    ),
    Guard("open_group: capacity", script("if most - live <= 0 then", "if false then")),
    Guard(
        "open_group: a name is used once",
        script("if is_finished_name(ARGV[1]) then", "if false then"),
    ),
    Guard(
        "open_group: a trajectory that is open",
        script(
            "    if writer == ARGV[3] then\n      replies[i] = tonumber(epoch)",
            "    if writer then\n      replies[i] = tonumber(epoch)",
        ),
    ),
    Guard(
        "post_sealed: the epoch of the lease",
        script(_IS_OPEN, "if state == 'open' then"),
    ),
    Guard(
        "post_sealed: a seal counts once",
        script(_IS_OPEN, "if state and string.match(rest, '^%d+') == epoch then"),
    ),
    Guard(
        "take_over: the lease has ended",
        script(
            "  if left_ms > 0 then\n    return redis.error_reply('HELD",
            "  if false then\n    return redis.error_reply('HELD",
        ),
    ),
    Guard(
        "take_over: the next epoch",
        script(
            "  epoch = epoch + 1\n  redis.call('HSET', KEYS[1], id, 'open:'",
            "  redis.call('HSET', KEYS[1], id, 'open:'",
        ),
    ),
    Guard("give_up: the lease was renewed", script("and lease_end <= until_ms then", "then")),
    Guard(
        "heartbeat: the lease is renewed",
        script("      redis.call('ZADD', KEYS[2], ends_ms, id)\n      replies", "      replies"),
    ),
    Guard(
        "post_reward: a reward counts once",
        script("if known and known ~= 'missed' then", "if false then"),
    ),
    Guard(
        "post_reward: what awaits none",
        script("if state ~= 'awaiting_reward' or known then", "if false then"),
    ),
    Guard(
        "open_group: groups that are open at a time",
        script("if most_open > 0 and most_open - (open or 0) <= 0 then", "if false then"),
    ),
    Guard(
        "open_group: a run that is paused",
        script("  if paused then\n    return 'the run", "  if false then\n    return 'the run"),
    ),
    Guard(
        "open_task: a prompt that waits is no new one",
        script("  if is_repeated then", "  if false then"),
    ),
    Guard(
        "every script: the epoch of the leader",
        script("if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then", "if false then"),
    ),
    Guard(
        "acquire_leader: the lease of another",
        script("owner ~= ARGV[1] and tonumber(expires_ms) > now_ms then", "false then"),
    ),
    Guard(
        "acquire_leader: the next epoch",
        script(
            "if parked or owner ~= ARGV[1] then\n  epoch = epoch + 1",
            "if false then\n  epoch = epoch + 1",
        ),
    ),
    Guard(
        "write_manifest: the next step",
        script("if step <= last then", "if false then"),
    ),
    Guard(
        "withdraw_plans: the plans before it stay",
        script("  redis.call('XADD', KEYS[4], entry[1], unpack(entry[2]))", ""),
    ),
    Guard(
        "write_manifest: what is sealed",
        script(
            "    if not entry or string.sub(entry, 1, 7) ~= 'sealed:' then", "    if false then"
        ),
    ),
    Guard(
        "settle_group: a group that is planned",
        script(
            "if state ~= 'open' and state ~= 'decided' then\n  return redis.error_reply('CONF",
            "if false then\n  return redis.error_reply('CONF",
        ),
    ),
    Guard(
        "settle_members: what is sealed",
        script("  if state == 'sealed' or state == 'awaiting_reward' then", "  if state then"),
    ),
    Guard(
        "grant_refill: an attempt that was opened",
        script("if redis.call('HEXISTS', KEYS[3], ARGV[4]) == 1 or", "if"),
    ),
    Guard(
        "fire_deadlines: a refill moved it",
        script("and num_refills(ARGV[i]) == ARGV[i + 1] then", "then"),
    ),
    Guard(
        "give_back: bytes of a batch",
        script("if string.sub(entries[i] or '', 1, 8) == 'planned:' then", "if false then"),
    ),
    Guard("stepped: a step counts once", script("if step == stepped + 1 then", "if true then")),
    Guard("committed: never falls", script("if step <= tonumber(committed) then", "if false then")),
    Guard(
        "start_session: what was stepped comes back",
        script(
            "redis.call('HSET', KEYS[1], 'stepped', step, 'committed', step,",
            "redis.call('HSET', KEYS[1], 'committed', step,",
        ),
    ),
    Guard(
        "advance_watermark: the checkpoints that are kept",
        script(
            "local first_kept = math.max(1, #steps - (config.retain_checkpoints or 2) + 1)",
            "local first_kept = math.max(1, #steps)",
        ),
    ),
    Guard(
        "trim_events: one snapshot behind",
        script(
            "if before ~= ARGV[2] then\n  redis.call('HSET', KEYS[2], 'before', before)",
            "if true then\n  redis.call('HSET', KEYS[2], 'before', ARGV[2] .. '9')",
        ),
    ),
    Guard(
        "renew_leader: the term is over",
        script(
            "if owner ~= ARGV[1] or epoch ~= ARGV[2] then\n  return {0,",
            "if false then\n  return {0,",
        ),
    ),
    Guard(
        "finish_run: events that came since",
        script("if closed ~= '1' or (last and last[1] ~= ARGV[2]) then", "if closed ~= '1' then"),
    ),
    Guard(
        "end_orphaned: what somebody holds",
        script(
            "if state == 'open' or state == 'awaiting_reward' then\n        return -1",
            "if false then\n        return -1",
        ),
    ),
    Guard(
        "every script of a session: its epoch and its name",
        script(_SESSION, ""),
    ),
    Guard(
        "stepped: the manifest",
        script(
            "if hash ~= ARGV[3] then\n  return redis.error_reply('CONFLICT step ' .. step .. ' has the manifest \"' .. (hash or '')\n    .. '\", not \"' .. ARGV[3] .. '\"')\nend\nif step == stepped + 1",
            "if step == stepped + 1",
        ),
    ),
    Guard(
        "committed: what is not stepped",
        script("if step > tonumber(stepped) then", "if false then"),
    ),
    Guard(
        "start_session: a new epoch",
        script("'session_epoch', epoch + 1,", "'session_epoch', math.max(1, epoch),"),
    ),
    Guard(
        "start_session: the manifest of the token",
        script(
            "  if hash ~= ARGV[4] then\n    return redis.error_reply('BEHIND",
            "  if false then\n    return redis.error_reply('BEHIND",
        ),
    ),
    Guard(
        "start_session: a batch that the store lost",
        script(
            "  if not hash then\n    return redis.error_reply('BEHIND",
            "  hash = hash or ARGV[4]\n  if not hash then\n    return redis.error_reply('BEHIND",
        ),
    ),
    Guard(
        "start_session: no token after a commit",
        script(
            "if ARGV[3] == '' then\n  if committed > 0 then",
            "if ARGV[3] == '' then\n  if false then",
        ),
    ),
    Guard(
        "release_payload: the tombstone",
        script(
            "redis.call('HSET', KEYS[2], 'released', ARGV[2])\n",
            "redis.call('HSET', KEYS[2], 'x', 1)\n",
        ),
    ),
    Guard(
        "fold_batch: what is of this batch",
        script("  if entry == planned then", "  if entry then"),
    ),
    Guard(
        "write_manifest: a run that is paused",
        script("if paused or is_revised or lineage", "if is_revised or lineage"),
    ),
    Guard(
        "advance_watermark: what an observer has not seen",
        script("  if expires_ms ~= '0' then\n    floor", "  if false then\n    floor"),
    ),
    Guard(
        "revise_config: a step that is planned",
        script("if step <= planned then", "if false then"),
        "has_reviser",
    ),
    Guard(
        "revise_config: the order of steps",
        script("if step < first then", "if false then"),
        "has_reviser",
    ),
    Guard(
        "announce_revision: groups of the steps before",
        script("planned * (before.batch_groups - after.batch_groups) + 0", "0"),
        "has_reviser",
    ),
    Guard(
        "write_manifest: the config of its step",
        script("if paused or is_revised or lineage", "if paused or lineage"),
        "has_reviser",
    ),
    Guard(
        "write_manifest: a short step",
        script("if num_groups ~= batch_groups then", "if false then"),
    ),
    Guard(
        "reopen_run: what was finished",
        script("redis.call('HDEL', KEYS[1], 'finished', 'leftover')\n", ""),
        "has_reopener",
    ),
    Guard(
        "observed: never falls",
        script("math.max(tonumber(seen), tonumber(ARGV[2]))", "tonumber(ARGV[2])"),
        "has_observer",
    ),
)
