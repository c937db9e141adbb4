"""Guards of the scripts that planners and trainers call."""

from __future__ import annotations

from simulator.breaks import Guard, script

LEADER = (
    "if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then\n"
    "  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])\nend"
)
_GROUP = (
    "\nlocal num_samples, state = string.match("
    "redis.call('HGET', KEYS[2], ARGV[2]) or '', '^(%d+):(.*)$')\n"
)
SESSION = "if refusal then\n  return refusal\nend\n"

RUN_GUARDS = (
    # the plan
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
        "withdraw_plans: bytes of a batch",
        script("'planned', string.format('%.0f', -num_bytes))", "'planned', 0)"),
    ),
    Guard("write_manifest: the chain", script("if last_hash ~= ARGV[4] then", "if false then")),
    Guard(
        "write_manifest: what is sealed",
        script(
            "    if not entry or string.sub(entry, 1, 7) ~= 'sealed:' then", "    if false then"
        ),
    ),
    Guard(
        "write_manifest: what is left open", script("  if num_left[state] then", "  if false then")
    ),
    Guard(
        "settle_group: once",
        script("if state == ARGV[3] or (not is_dropped and state ~= 'open') then", "if false then"),
    ),
    Guard(
        "settle_group: a cut that comes late",
        script("if not is_dropped and tonumber(granted) > tonumber(ARGV[5]) then", "if false then"),
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
    Guard("grant_refill: once", script("if number <= tonumber(granted) then", "if false then")),
    Guard(
        "grant_refill: an attempt that was opened",
        script("if redis.call('HEXISTS', KEYS[3], ARGV[4]) == 1 or", "if"),
    ),
    Guard(
        "fire_deadlines: a refill moved it",
        script("and num_refills(ARGV[i]) == ARGV[i + 1] then", "then"),
    ),
    Guard(
        "settle_group: bytes of what was never begun",
        script("    elseif from == '' then\n      give_back(id)\n", ""),
    ),
    Guard(
        "give_back: bytes of a batch",
        script("if string.sub(entries[i] or '', 1, 8) == 'planned:' then", "if false then"),
    ),
    # the trainer
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
        "start_session: another session was begun since",
        script("local over = redis.call('HGET', KEYS[4], ARGV[1])", "local over = false"),
    ),
    # what is over
    Guard(
        "raise_floor: the checkpoints that are kept",
        script(
            "local first_kept = math.max(1, #steps - (config.retain_checkpoints or 2) + 1)",
            "local first_kept = math.max(1, #steps)",
        ),
    ),
    Guard(
        "finish_batch: the snapshot",
        script(
            "if step > tonumber(redis.call('HGET', KEYS[6], 'step') or 0) then", "if false then"
        ),
    ),
    Guard(
        "fold_ended: a record counts once",
        script("if tonumber(ARGV[2]) <= newest then", "if false then"),
    ),
    Guard(
        "fold_ended: a group that may change",
        script("  if not IS_OVER[state] then", "  if false then"),
    ),
    Guard(
        "trim_events: one snapshot behind",
        script(
            "if before ~= ARGV[2] then\n  redis.call('HSET', KEYS[2], 'before', before)",
            "if true then\n  redis.call('HSET', KEYS[2], 'before', ARGV[2] .. '9')",
        ),
    ),
    # each check of an epoch by itself: what one lets through, another may still refuse
    *(
        Guard(f"{name}: the epoch of the leader, here alone", script(LEADER + rest, rest))
        for name, rest in (
            ("write_manifest", "\nlocal step = tonumber(ARGV[2])\nlocal last"),
            ("settle_group", _GROUP + "local is_dropped"),
            ("settle_eval", _GROUP + "if state == 'evaluated'"),
            ("batch_due", "\nlocal last = redis.call('XREVRANGE', KEYS[2]"),
            ("give_up", "\nlocal time = redis.call('TIME')"),
            ("raise_floor", "\nlocal stepped, released, checkpoints"),
            ("fold_batch", "\nlocal released = tonumber"),
            ("finish_batch", "\nlocal step = tonumber(ARGV[2])\nlocal released"),
            ("save_snapshot", '\n\n-- An event id is "<ms>-<number>".'),
            ("finish_run", "\nlocal closed, finished"),
        )
    ),
    Guard(
        "renew_leader: the term is over",
        script(
            "if owner ~= ARGV[1] or epoch ~= ARGV[2] then\n  return {0,",
            "if false then\n  return {0,",
        ),
    ),
    Guard(
        "park_leader: leases and deadlines",
        script(
            "if redis.call('ZCARD', KEYS[2]) > 0 or redis.call('ZCARD', KEYS[3]) > 0 then",
            "if false then",
        ),
    ),
    Guard(
        "open_group: a lease that begins in a parked run",
        script(
            "  if group and redis.call('HEXISTS', KEYS[16]",
            "  if false and redis.call('HEXISTS', KEYS[16]",
        ),
    ),
    Guard(
        "release_leader: the leadership of another",
        script(
            "if owner ~= ARGV[1] or epoch ~= ARGV[2] then\n  return 0\n",
            "if false then\n  return 0\n",
        ),
    ),
    Guard("batch_due: a repeat", script("if last and last[2][2] == ARGV[2] then", "if false then")),
    Guard(
        "finish_run: events that came since",
        script("if closed ~= '1' or (last and last[1] ~= ARGV[2]) then", "if closed ~= '1' then"),
    ),
    Guard(
        "end_unheld: what somebody holds",
        script(
            "if state == 'open' or state == 'awaiting_reward' then\n        return -1",
            "if false then\n        return -1",
        ),
    ),
    Guard(
        "settle_eval: what does not count is surplus",
        script(
            "    if from == 'open' or from == 'awaiting_reward' or from == 'sealed' then\n      settle",
            "    if false then\n      settle",
        ),
    ),
    # sessions
    Guard(
        "every script of a session: its epoch and its name",
        script(SESSION, ""),
    ),
    Guard(
        "stepped: the manifest",
        script(
            "if hash ~= ARGV[3] then\n  return redis.error_reply('CONFLICT step ' .. step .. ' has the manifest \"' .. (hash or '')\n    .. '\", not \"' .. ARGV[3] .. '\"')\nend\nif step == stepped + 1",
            "if step == stepped + 1",
        ),
    ),
    Guard(
        "stepped: what the store has lost",
        script("if step > tonumber(planned or 0) then", "if false then"),
    ),
    Guard(
        "committed: the epoch and the name of the session",
        script(
            SESSION + "local step = tonumber(ARGV[2])\nif lost and",
            "local step = tonumber(ARGV[2])\nif lost and",
        ),
    ),
    Guard(
        "committed: what is not stepped",
        script("if step > tonumber(stepped) then", "if false then"),
    ),
    Guard(
        "announce_version: the epoch and the name of the session",
        script(
            SESSION + "if ARGV[5] ~= lineage then",
            "if ARGV[5] ~= lineage then",
        ),
    ),
    Guard(
        "announce_version: the lineage of the run",
        script("if ARGV[5] ~= lineage then", "if false then"),
    ),
    Guard(
        "announce_version: a version is announced once",
        script(
            "if known then\n  if known[2][2] == ARGV[3]",
            "if false then\n  if known[2][2] == ARGV[3]",
        ),
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
        "start_session: steps that are released",
        script("  if step < tonumber(released or 0) then", "  if false then"),
    ),
    Guard(
        "start_session: no token after a commit",
        script(
            "if ARGV[3] == '' then\n  if committed > 0 then",
            "if ARGV[3] == '' then\n  if false then",
        ),
    ),
    Guard(
        "start_session: checkpoints that are given up",
        script("  if tonumber(earlier) < step then", "  if true then"),
    ),
    # what is released
    Guard(
        "release_payload: the tombstone",
        script(
            "redis.call('HSET', KEYS[2], 'released', ARGV[2])\n",
            "redis.call('HSET', KEYS[2], 'x', 1)\n",
        ),
    ),
    Guard(
        "fold_batch: a step that is not released",
        script("if tonumber(ARGV[2]) > released then", "if false then"),
    ),
    Guard(
        "fold_batch: what is of this batch",
        script("  if entry == planned then", "  if entry then"),
    ),
    Guard(
        "finish_batch: the next step",
        script("if step <= folded then\n  return 0", "if false then\n  return 0"),
    ),
    # who stands beside the run
    Guard(
        "write_manifest: a run that is paused",
        script("if paused or is_revised or lineage", "if is_revised or lineage"),
    ),
    Guard(
        "raise_floor: what an observer has not seen",
        script("  if expires_ms ~= '0' then\n    floor", "  if false then\n    floor"),
    ),
)
