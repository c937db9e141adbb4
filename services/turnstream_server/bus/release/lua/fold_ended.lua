#!lua flags=allow-oom
-- Removes trajectories that ended untrained from the ledger. Leaves a compact record, counts of
-- their reasons, and fingerprints of dropped groups, all or nothing.
--
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] number of the record    ARGV[3] the record
--   ARGV[4...] trajectory ids
-- Reply:     1, or 0 where this record was written before
-- Errors:    CONFLICT  the number is not the next one, or a trajectory or its group may still
--                      change

local LEADER, FRONTIER, LEDGER, GROUPS, OVER, ENDED, REASONS, REWARDS = unpack(KEYS)
local MOST_REASONS = 1000  -- generators make some of them up
local IS_OVER = {planned = true, filtered = true, expired = true, incomplete = true, surplus = true,
  evaluated = true, over = true}

-- include: ended.lua
-- include: turnstream.store.run/slices.lua
-- include: turnstream.store.run/finished_names.lua
-- include: turnstream_server.bus.leadership/fenced.lua

local newest = tonumber(redis.call('HGET', FRONTIER, 'ends') or 0)
if tonumber(ARGV[2]) <= newest then
  return 0
end
if tonumber(ARGV[2]) ~= newest + 1 then
  return redis.error_reply('CONFLICT record ' .. ARGV[2] .. ' does not follow ' .. newest)
end

-- 1. Nothing is written before every trajectory has been looked at.
local ids = {}
for i = 4, #ARGV do
  ids[#ids + 1] = ARGV[i]
end
local numbers = {}  -- ledger entry -> how many
local groups = {}  -- names, each of them once
local first_of = {}  -- group name -> the first trajectory of it
for i, entry in ipairs(read_sliced('HMGET', LEDGER, ids)) do
  entry = entry or 'unknown'
  if not numbers[entry] and not has_ended(entry) then
    return redis.error_reply('CONFLICT ' .. ids[i] .. ' is ' .. entry .. ', not at its end')
  end
  numbers[entry] = (numbers[entry] or 0) + 1
  local group = string.match(ids[i], '^[^/]*')
  if not first_of[group] then
    first_of[group] = ids[i]
    groups[#groups + 1] = group
  end
end
local dropped = {}  -- groups; one that is planned goes with its batch
for i, entry in ipairs(read_sliced('HMGET', GROUPS, groups)) do
  local state = string.match(entry or ':over', ':(.*)$')
  if not IS_OVER[state] then
    return redis.error_reply('CONFLICT group ' .. groups[i] .. ' of ' .. first_of[groups[i]] .. ' is '
      .. state)
  end
  if entry and state ~= 'planned' then
    dropped[#dropped + 1] = groups[i]
  end
end

local COUNTERS = {{REASONS}}
-- include: turnstream_server.bus.leadership/whole_counters.lua

-- 2. Write.
for reason, number in pairs(numbers) do
  -- Filtered groups with different values count together: see counted_reason in ledger.py.
  reason = string.match(reason, '^(filtered:.*) %([^()]*%)$') or reason
  if redis.call('HEXISTS', REASONS, reason) == 0
    and redis.call('HLEN', REASONS) >= MOST_REASONS then
    reason = string.match(reason, '^[^:]*') .. ':another reason'
  end
  redis.call('HINCRBY', REASONS, reason, number)
end
if #dropped > 0 then
  write_sliced('HDEL', GROUPS, dropped)
  add_finished(dropped)
end
write_sliced('HDEL', REWARDS, ids)
write_sliced('HDEL', LEDGER, ids)
redis.call('HSET', ENDED, ARGV[2], ARGV[3])
redis.call('HSET', FRONTIER, 'ends', ARGV[2])
return 1
