#!lua flags=allow-oom
-- Finds undecided groups of a closed run, and evaluations, that no generator holds: no attempt is
-- open or waits for its reward. Fires the deadline of those for which the caller sent a record.
--
-- Arguments:
--   ARGV[1] leader epoch
--   ARGV[2...] three per group: its name; the refills granted to it and the record, or "" and ""
-- Reply: per group: its granted refills if it is orphaned; -1 if it has a writer or is decided; -2
--        if this call fired its deadline

local LEADER, FRONTIER, GROUPS, MEMBERS, LEDGER, EVENTS, DEADLINES = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

-- include: turnstream.store.run/slices.lua
-- include: group_attempts.lua

local is_closed = redis.call('HGET', FRONTIER, 'closed') == '1'

local function refills_of_unheld(group)
  local num_samples, state = string.match(redis.call('HGET', GROUPS, group) or '', '^(%d+):(.*)$')
  if not is_closed or (state ~= 'open' and state ~= 'evaluating') then
    return -1
  end
  local is_held = false
  each_attempt(group, num_samples, function(_, entries)
    for _, entry in ipairs(entries) do
      local state = string.match(entry or '', '^[^:]*')
      is_held = is_held or state == 'open' or state == 'awaiting_reward'
    end
    return is_held
  end)
  local refills = string.match(redis.call('HGET', MEMBERS, group) or '', '^%d+:%d+:(%d+)')
  return is_held and -1 or tonumber(refills or 0)
end

local replies = {}
for i = 2, #ARGV, 3 do
  local refills = refills_of_unheld(ARGV[i])
  if refills >= 0 and refills == tonumber(ARGV[i + 1]) then
    redis.call('XADD', EVENTS, '*', 'r', ARGV[i + 2])
    redis.call('ZREM', DEADLINES, 'group:' .. ARGV[i])
    refills = -2
  end
  replies[#replies + 1] = refills
end
return replies
