#!lua flags=allow-oom
-- Makes the plans from a damaged step on void, all of them or none: what was damaged is dead, the
-- rest is sealed again, and its groups are decided. The trainer session ends by it, so that no rank
-- mixes what it was given with what will be planned instead.
--
-- Runs also when the server is full: without it nothing of the run could ever be released.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader      hash    read: epoch
--   KEYS[2] frontier    hash    read: stepped, replan, replanned, opened_groups, live_groups; changed:
--                               planned, planned_groups, at_plans, session_epoch, session,
--                               session_ms, withdrawn, replanned; removed: replan, damaged, finished
--   KEYS[3] batches     hash    removed: the steps
--   KEYS[4] plan        stream  removed: their entries. The others are written again: an id below
--                               one that was there can be added to a new stream only
--   KEYS[5] ledger      hash    trajectory id: "planned:<step>" becomes "sealed:<epoch>", or
--                               "dead:<reason>"
--   KEYS[6] counts      hash    changed: planned, sealed, dead, dead_bytes
--   KEYS[7] groups      hash    group name -> "<num_samples>:planned" becomes ":decided"
--   KEYS[8] snapshot    hash    changed: position, step, record; before, the position before; added:
--                               withdrawn_at, this position
--   KEYS[9] events      stream  added: the trajectory_died records, then that of plans_withdrawn
--   KEYS[10] letters    hash    added: trajectory id -> "<since, server ms>:<bytes>"
--   KEYS[11] wake       stream  added, to wake replicas, ranks and waiting callers
--   KEYS[12] held       hash    read
--   KEYS[13] budget     hash    changed: stored, planned
--   KEYS[14] config     hash    read: the revisions; changed: "from:<revision>" of one whose first
--                               step is planned again: it is in force from the withdrawn step on
--   KEYS[15] observers  hash    changed: the newest step seen, where that step is withdrawn
--   KEYS[16] times      hash    removed: when the steps were planned
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] name of the request    ARGV[3] the first step
--   ARGV[4] its manifest hash    ARGV[5] the newest step    ARGV[6] its manifest hash
--   ARGV[7] id of the event that the snapshot includes    ARGV[8] the snapshot's record
--   ARGV[9] the plans_withdrawn record    ARGV[10] what is said of it, JSON
--   ARGV[11] how many are dead    ARGV[12] how many groups
--   ARGV[13...] of every dead: trajectory id, reason, bytes of its payload, trajectory_died record;
--               then the group names; then of every other trajectory: its id, and the lease epoch
--               that it was sealed with
-- Reply:     1, or 0 where it was done before
-- Errors:
--   FENCED    another planner leads
--   CONFLICT  the request does not stand; a step is stepped; there are other plans, or what they
--             name is not planned: nothing was written

local LEDGER, GROUPS, CONFIG = KEYS[5], KEYS[7], KEYS[14]
local FIRST_DEAD, PER_DEAD, PER_LEFT = 13, 4, 2
local CHUNK = 1000  -- unpack fails above a few thousand values

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local stepped, planned, standing, done, withdrawn, epoch = unpack(redis.call('HMGET', KEYS[2],
  'stepped', 'planned', 'replan', 'replanned', 'withdrawn', 'session_epoch'))
if string.match(done or '', '^([^:]*):') == ARGV[2] then
  return 0
end
if string.match(standing or '', '^(.*):%d+$') ~= ARGV[2] then
  return redis.error_reply('CONFLICT the request ' .. ARGV[2] .. ' does not stand')
end
local first, newest = tonumber(ARGV[3]), tonumber(ARGV[5])
if first <= tonumber(stepped) then
  return redis.error_reply('CONFLICT step ' .. first .. ' is stepped, and stays as it was planned')
end

local function batch(number)
  local entry = redis.call('HGET', KEYS[3], string.format('%.0f', number))
  local total, hash = string.match(entry or '', '^(%d+):(.*)$')
  return tonumber(total or 0), hash
end

local _, first_hash = batch(first)
local total, newest_hash = batch(newest)
if planned ~= ARGV[5] or first_hash ~= ARGV[4] or newest_hash ~= ARGV[6] then
  return redis.error_reply('CONFLICT steps ' .. first .. ' to ' .. newest .. ' have other plans')
end

-- 1. Nothing is written before every trajectory and every group has been looked at.
local num_dead, num_groups = tonumber(ARGV[11]), tonumber(ARGV[12])
local first_group = FIRST_DEAD + PER_DEAD * num_dead
local first_left = first_group + num_groups
local ids = {}
for i = FIRST_DEAD, first_group - 1, PER_DEAD do
  ids[#ids + 1] = ARGV[i]
end
for i = first_left, #ARGV, PER_LEFT do
  ids[#ids + 1] = ARGV[i]
end
if #ids ~= total - batch(first - 1) then
  return redis.error_reply('CONFLICT steps ' .. first .. ' to ' .. newest .. ' have '
    .. total - batch(first - 1) .. ' trajectories, not ' .. #ids)
end
local num_bytes = 0
for start = 1, #ids, CHUNK do
  local some = {unpack(ids, start, math.min(start + CHUNK - 1, #ids))}
  for i, entry in ipairs(redis.call('HMGET', LEDGER, unpack(some))) do
    local step = tonumber(string.match(entry or '', '^planned:(%d+)$'))
    if not step or step < first then
      return redis.error_reply('CONFLICT ' .. some[i] .. ' is ' .. (entry or 'unknown')
        .. ', not planned from step ' .. first .. ' on')
    end
  end
  for _, bytes in ipairs(redis.call('HMGET', KEYS[12], unpack(some))) do
    num_bytes = num_bytes + (tonumber(bytes or 0) or 0)
  end
end
local function settings(number)
  return cjson.decode(redis.call('HGET', CONFIG, string.format('%.0f', number)))
end

local newest_config = tonumber(redis.call('HGET', CONFIG, 'newest'))
local batch_groups = {}  -- of every config
for number = 1, newest_config do
  batch_groups[number] = settings(number).batch_groups
end
local sizes = {}
for i = first_group, first_left - 1 do
  local size, state = string.match(redis.call('HGET', GROUPS, ARGV[i]) or '', '^(%d+):(.*)$')
  if state ~= 'planned' then
    return redis.error_reply('CONFLICT group ' .. ARGV[i] .. ' is ' .. (state or 'over')
      .. ', not planned')
  end
  sizes[ARGV[i]] = size
end

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(KEYS[6]) or damaged(KEYS[13])
  or damaged(KEYS[2], 'session_epoch', 'planned_groups', 'opened_groups', 'live_groups', 'revised_groups')
if damage then
  return damage
end

-- 2. Write: what becomes of the trajectories,
local time = redis.call('TIME')
local since = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local dead_bytes = 0
for i = FIRST_DEAD, first_group - 1, PER_DEAD do
  redis.call('HSET', LEDGER, ARGV[i], 'dead:' .. ARGV[i + 1])
  redis.call('HSET', KEYS[10], ARGV[i], since .. ':' .. ARGV[i + 2])
  redis.call('XADD', KEYS[9], '*', 'r', ARGV[i + 3])
  dead_bytes = dead_bytes + ARGV[i + 2]
end
for i = first_left, #ARGV, PER_LEFT do
  redis.call('HSET', LEDGER, ARGV[i], 'sealed:' .. ARGV[i + 1])
end
for group, size in pairs(sizes) do
  redis.call('HSET', GROUPS, group, size .. ':decided')
end
redis.call('HINCRBY', KEYS[6], 'planned', -#ids)
redis.call('HINCRBY', KEYS[6], 'sealed', #ids - num_dead)
redis.call('HINCRBY', KEYS[6], 'dead', num_dead)
redis.call('HINCRBY', KEYS[6], 'dead_bytes', string.format('%.0f', dead_bytes))
if num_bytes > 0 then
  redis.call('HINCRBY', KEYS[13], 'planned', string.format('%.0f', -num_bytes))
  redis.call('HINCRBY', KEYS[13], 'stored', string.format('%.0f', num_bytes))
end

-- of the plans,
local kept = redis.call('XRANGE', KEYS[4], '-', string.format('(%.0f-0', first))
redis.call('DEL', KEYS[4])
for _, entry in ipairs(kept) do
  redis.call('XADD', KEYS[4], entry[1], unpack(entry[2]))
end
for step = first, newest do
  redis.call('HDEL', KEYS[3], string.format('%.0f', step))
  redis.call('HDEL', KEYS[16], string.format('planned:%.0f', step))
end
local revision, through = string.match(withdrawn or '0:0', '^(%d+):(%d+)$')
redis.call('HSET', KEYS[2], 'planned', string.format('%.0f', first - 1), 'session_epoch', epoch + 1,
  'session', '', 'session_ms', since, 'replanned', ARGV[2] .. ':' .. since .. ':' .. ARGV[10],
  'withdrawn', string.format('%.0f:%.0f', revision + 1, math.max(newest, tonumber(through))))
redis.call('HDEL', KEYS[2], 'replan', 'damaged', 'finished')
local num_planned = redis.call('HINCRBY', KEYS[2], 'planned_groups', -num_groups)
local ever, live, at_plans = unpack(
  redis.call('HMGET', KEYS[2], 'opened_groups', 'live_groups', 'at_plans'))
local stand = {}
for plan in string.gmatch(at_plans or '', '[^,]+') do
  if tonumber(string.match(plan, '^%d+')) < first then
    stand[#stand + 1] = plan
  end
end
if #stand == 0 then
  stand[1] = string.format('%.0f:%.0f:%.0f', first - 1, ever - live, num_planned)
end
redis.call('HSET', KEYS[2], 'at_plans', table.concat(stand, ','))

-- of configs that were in force from a later step on: the groups that admission counts for the steps
-- between were those of the config before;
local function first_step(number)
  return tonumber(redis.call('HGET', CONFIG, string.format('from:%.0f', number)))
end

-- (a short step had counted less than its config says, see write_manifest.lua)
local usual, number = 0, newest_config
for step = newest, first, -1 do
  while number > 1 and first_step(number) > step do
    number = number - 1
  end
  usual = usual + batch_groups[number]
end
if num_groups ~= usual then
  redis.call('HINCRBY', KEYS[2], 'revised_groups', string.format('%.0f', usual - num_groups))
end
for number = 2, newest_config do
  local from = first_step(number)
  if from > first then
    local fewer = batch_groups[number - 1] - batch_groups[number]
    redis.call('HINCRBY', KEYS[2], 'revised_groups',
      string.format('%.0f', (first - from) * fewer + 0))  -- no "-0"
    redis.call('HSET', CONFIG, string.format('from:%.0f', number), string.format('%.0f', first))
  end
end

-- and of those who know them.
local observers = redis.call('HGETALL', KEYS[15])
for i = 1, #observers, 2 do
  local seen, rest = string.match(observers[i + 1], '^(%d+)(:.*)$')
  if seen and tonumber(seen) >= first then
    redis.call('HSET', KEYS[15], observers[i], string.format('%.0f', first - 1) .. rest)
  end
end
local before = redis.call('HGET', KEYS[8], 'position') or '0-0'
if before ~= ARGV[7] then
  redis.call('HSET', KEYS[8], 'before', before)
end
redis.call('HSET', KEYS[8], 'position', ARGV[7], 'step', string.format('%.0f', first - 1), 'record',
  ARGV[8], 'withdrawn_at', ARGV[7])
redis.call('XADD', KEYS[9], '*', 'r', ARGV[9])
redis.call('XADD', KEYS[11], 'MAXLEN', 1, '*', 'w', '')
return 1
