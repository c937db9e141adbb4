#!lua flags=allow-oom
-- Takes trajectories that ended untrained out of the ledger and leaves a compact record, counts of
-- their reasons, and fingerprints of the groups that were dropped, all or nothing.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash  read: epoch
--   KEYS[2] frontier  hash  changed: ends, the number of the newest record
--   KEYS[3] ledger    hash  removed: the trajectory ids
--   KEYS[4] groups    hash  read; removed: names of groups that were dropped
--   KEYS[5] over      hash  added: their fingerprints
--   KEYS[6] ended     hash  added: number -> record
--   KEYS[7] reasons   hash  changed: "<state>:<reason>" -> how many
--   KEYS[8] rewards   hash  removed: the trajectory ids
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] number of the record    ARGV[3] the record
--   ARGV[4...] trajectory ids
-- Reply: 1, or 0 where this record was written before
-- Errors:
--   FENCED    another planner leads
--   CONFLICT  the number is not the next one, or a trajectory has not ended, or its group may still change

local OVER = KEYS[5]
local MOST_REASONS = 1000  -- generators make some of them up
local IS_OVER = {planned = true, filtered = true, expired = true, incomplete = true, surplus = true,
  evaluated = true, over = true}
local ENDS = {filtered = true, expired = true, surplus = true, incomplete = true, evaluated = true,
  abandoned = true}

local function has_ended(entry)
  return ENDS[string.match(entry, '^[^:]*')] or string.sub(entry, 1, 14) == 'dead:discarded'
end

-- include: turnstream.store.run/slices.lua

-- include: turnstream.store.run/finished_names.lua

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local newest = tonumber(redis.call('HGET', KEYS[2], 'ends') or 0)
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
for i, entry in ipairs(read_sliced('HMGET', KEYS[3], ids)) do
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
for i, entry in ipairs(read_sliced('HMGET', KEYS[4], groups)) do
  local state = string.match(entry or ':over', ':(.*)$')
  if not IS_OVER[state] then
    return redis.error_reply('CONFLICT group ' .. groups[i] .. ' of ' .. first_of[groups[i]] .. ' is '
      .. state)
  end
  if entry and state ~= 'planned' then
    dropped[#dropped + 1] = groups[i]
  end
end

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(KEYS[7])
if damage then
  return damage
end

-- 2. Write.
for reason, number in pairs(numbers) do
  if redis.call('HEXISTS', KEYS[7], reason) == 0
    and redis.call('HLEN', KEYS[7]) >= MOST_REASONS then
    reason = string.match(reason, '^[^:]*') .. ':another reason'
  end
  redis.call('HINCRBY', KEYS[7], reason, number)
end
if #dropped > 0 then
  write_sliced('HDEL', KEYS[4], dropped)
  add_finished(dropped)
end
write_sliced('HDEL', KEYS[8], ids)
write_sliced('HDEL', KEYS[3], ids)
redis.call('HSET', KEYS[6], ARGV[2], ARGV[3])
redis.call('HSET', KEYS[2], 'ends', ARGV[2])
return 1
