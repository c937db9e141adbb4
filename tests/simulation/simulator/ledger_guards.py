"""Guards of the scripts that generators call."""

from __future__ import annotations

from simulator.breaks import Guard, script

_IS_OPEN = (
    "if state == 'open' and (rest == epoch .. writer\n"
    "      or writer == '' and string.match(rest, '^%d+') == epoch) then"
)
_IS_ANOTHERS = "if string.match(rest, '^%d+') ~= ARGV[2] and rest ~= ARGV[2] then"

LEDGER_GUARDS = (
    # the payload of a trajectory
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
    Guard(
        "append: the first call of another writer",
        script("if holder == epoch and is_first_call and writer ~= caller then", "if false then"),
    ),
    # the ledger
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
        "open_group: a group that is decided",
        script(
            "  elseif state ~= begins then\n    replies[i] = 'CONFLICT [group] group '",
            "  elseif false then\n    replies[i] = 'CONFLICT [group] group '",
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
        "post_sealed: a group that is decided",
        script("    if is_decided(id) then", "    if false then"),
    ),
    Guard(
        "abandon: the epoch of the lease",
        script(_IS_ANOTHERS, "if false then"),
    ),
    Guard(
        "abandon: what is sealed",
        script(
            "if state ~= 'open' then\n  return redis.error_reply('CONFLICT [' .. state .. '] ' .. ARGV[1] .. ' is already ' .. state)\nend\n"
            + _IS_ANOTHERS,
            "if string.match(rest, '^%d+') ~= string.match(ARGV[2], '^%d+') then",
        ),
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
        "give_up: the epoch of the lease",
        script("if epoch == ARGV[i + 1] and lease_end", "if lease_end"),
    ),
    Guard(
        "give_up: a time that the clock has yet to reach",
        script("  until_ms = -math.huge", "  until_ms = tonumber(ARGV[2])"),
    ),
    Guard(
        "list_lapsed: a time that the clock has yet to reach",
        script("if tonumber(until_ms) > now_ms then", "if false then"),
    ),
    Guard(
        "announce_revision: leases that become shorter",
        script("  if after_ms < before_ms then", "  if false then"),
    ),
    Guard(
        "heartbeat: the lease is renewed",
        script("      redis.call('ZADD', KEYS[2], ends_ms, id)\n      replies", "      replies"),
    ),
    Guard(
        "post_reward: a reward counts once",
        script("if known and known ~= 'missed' then", "if false then"),
    ),
    Guard(
        "post_reward: what its deadline has ended",
        script("if state ~= 'awaiting_reward' or known then", "if state ~= 'awaiting_reward' then"),
    ),
    Guard(
        "post_reward: what awaits none",
        script("if state ~= 'awaiting_reward' or known then", "if false then"),
    ),
    # admission
    Guard(
        "open_group: groups that are open at a time",
        script("if most_open > 0 and most_open - (open or 0) <= 0 then", "if false then"),
    ),
    Guard(
        "open_group: what was open before needs no room",
        script("local needs_room = again == ''", "local needs_room = true"),
    ),
    Guard(
        "open_group: a run that is paused",
        script("  if paused then\n    return 'the run", "  if false then\n    return 'the run"),
    ),
    Guard("open_group: a run that is closed", script("if closed ~= '0' then", "if false then")),
    Guard(
        "next_task: a request that is sent again",
        script("if request == REQUEST then", "if false then"),
    ),
    Guard(
        "next_task: a prompt that waits is no new one",
        script("if redis.call('ZREM', AGAIN, number) == 0 then", "if true then"),
    ),
    Guard(
        "reopen_task: a prompt that goes on as an earlier group",
        script("redis.call('HEXISTS', GROUPS, NAME) == 0 and had_another() then", "false then"),
    ),
    Guard(
        "reserve: the lease",
        script(
            "if lease and (lease == ARGV[i + 1] or string.match(lease, '^%d+') == ARGV[i + 1]) then",
            "if lease then",
        ),
    ),
    Guard(
        "heartbeat: the epoch of the lease",
        script("if epoch == ARGV[i + 1] or rest == ARGV[i + 1] then", "if true then"),
    ),
)
