#!lua flags=allow-oom
-- Says which undecided groups of a closed run, and which evaluations, nobody holds: no attempt is open
-- or waits for its reward. To those that the caller gives a record for, it fires the deadline.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash    read: epoch
--   KEYS[2] frontier  hash    read: closed
--   KEYS[3] groups    hash    read: group name -> "<num_samples>:<state>"
--   KEYS[4] members   hash    read: group name -> "<num_needed>:<highest attempt>:<refills>:..."
--   KEYS[5] ledger    hash    read: the attempts of these groups
--   KEYS[6] events    stream  added: field r = the deadline_fired record
--   KEYS[7] deadlines zset    removed: those that are fired
-- Arguments:
--   ARGV[1] leader epoch
--   ARGV[2...] three per group: its name; the refills granted to it and the record, or "" and ""
-- Reply: per group: the refills granted to it, where nobody holds it; -1 where somebody does, or it
--        is decided; -2 where its deadline was fired now
-- Errors:
--   FENCED    another planner leads

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local is_closed = redis.call('HGET', KEYS[2], 'closed') == '1'

local function refills_of_unheld(group)
  local num_samples, state = string.match(redis.call('HGET', KEYS[3], group) or '', '^(%d+):(.*)$')
  if not is_closed or (state ~= 'open' and state ~= 'evaluating') then
    return -1
  end
  local attempts, refills = string.match(redis.call('HGET', KEYS[4], group) or '',
    '^%d+:(%d+):(%d+)')
  for sample = 0, num_samples - 1 do
    for attempt = 0, tonumber(attempts or 0) do
      local entry = redis.call('HGET', KEYS[5], group .. '/' .. sample .. '/' .. attempt) or ''
      local state = string.match(entry, '^[^:]*')
      if state == 'open' or state == 'awaiting_reward' then
        return -1
      end
    end
  end
  return tonumber(refills or 0)
end

local replies = {}
for i = 2, #ARGV, 3 do
  local refills = refills_of_unheld(ARGV[i])
  if refills >= 0 and refills == tonumber(ARGV[i + 1]) then
    redis.call('XADD', KEYS[6], '*', 'r', ARGV[i + 2])
    redis.call('ZREM', KEYS[7], 'group:' .. ARGV[i])
    refills = -2
  end
  replies[#replies + 1] = refills
end
return replies
