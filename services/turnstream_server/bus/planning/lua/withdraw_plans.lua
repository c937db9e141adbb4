#!lua flags=allow-oom
-- Withdraws the plans from a damaged step on, all or none. Damaged trajectories are dead, the
-- others are sealed again, and their groups are decided. The trainer session ends, so that no rank
-- mixes withdrawn batches with new ones. Runs also when the server is full.
--
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] name of the request    ARGV[3] the first step
--   ARGV[4] its manifest hash    ARGV[5] the newest step    ARGV[6] its manifest hash
--   ARGV[7] id of the event that the snapshot includes    ARGV[8] the snapshot's record
--   ARGV[9] the plans_withdrawn record    ARGV[10] the answer, JSON
--   ARGV[11] number of dead trajectories    ARGV[12] number of groups
--   ARGV[13...] four per dead trajectory: its id, reason, bytes of its payload, trajectory_died
--               record;
--               then the group names; then two per other trajectory: its id and lease epoch
-- Reply:     1, or 0 where it was done before
-- Errors:    CONFLICT  the request is not pending; a step is stepped; the plans are others, or name
--            trajectories that are not planned: nothing was written

local LEADER, FRONTIER, BATCHES, PLAN, LEDGER, COUNTS, GROUPS, SNAPSHOT, EVENTS, LETTERS, WAKE,
  HELD, BUDGET, CONFIG, OBSERVERS, TIMES = unpack(KEYS)
local FIRST_DEAD, PER_DEAD, PER_LEFT = 13, 4, 2
local CHUNK = 1000  -- unpack fails above a few thousand values

-- include: turnstream_server.bus.leadership/fenced.lua

local stepped, planned, pending, done, withdrawn, epoch = unpack(redis.call('HMGET', FRONTIER,
  'stepped', 'planned', 'replan', 'replanned', 'withdrawn', 'session_epoch'))
if string.match(done or '', '^([^:]*):') == ARGV[2] then
  return 0
end
if string.match(pending or '', '^(.*):%d+$') ~= ARGV[2] then
  return redis.error_reply('CONFLICT the request ' .. ARGV[2] .. ' is not pending')
end
local first, newest = tonumber(ARGV[3]), tonumber(ARGV[5])
if first <= tonumber(stepped) then
  return redis.error_reply('CONFLICT step ' .. first .. ' is stepped, and stays as it was planned')
end

local function batch(number)
  local entry = redis.call('HGET', BATCHES, string.format('%.0f', number))
  local total, hash = string.match(entry or '', '^(%d+):(.*)$')
  return tonumber(total or 0), hash
end

local _, first_hash = batch(first)
local total, newest_hash = batch(newest)
if planned ~= ARGV[5] or first_hash ~= ARGV[4] or newest_hash ~= ARGV[6] then
  return redis.error_reply('CONFLICT steps ' .. first .. ' to ' .. newest .. ' have other plans')
end

-- 1. Check every trajectory and every group before the first write.
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
  for _, bytes in ipairs(redis.call('HMGET', HELD, unpack(some))) do
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
    return redis.error_reply('CONFLICT group ' .. ARGV[i] .. ' is ' .. (state or 'finished')
      .. ', not planned')
  end
  sizes[ARGV[i]] = size
end

local COUNTERS = {{COUNTS}, {BUDGET}, {FRONTIER, 'session_epoch', 'planned_groups',
  'opened_groups', 'live_groups', 'revised_groups'}}
-- include: turnstream_server.bus.leadership/whole_counters.lua

-- 2. Write the states of the trajectories and groups.
local time = redis.call('TIME')
local since = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local dead_bytes = 0
for i = FIRST_DEAD, first_group - 1, PER_DEAD do
  redis.call('HSET', LEDGER, ARGV[i], 'dead:' .. ARGV[i + 1])
  redis.call('HSET', LETTERS, ARGV[i], since .. ':' .. ARGV[i + 2])
  redis.call('XADD', EVENTS, '*', 'r', ARGV[i + 3])
  dead_bytes = dead_bytes + ARGV[i + 2]
end
for i = first_left, #ARGV, PER_LEFT do
  redis.call('HSET', LEDGER, ARGV[i], 'sealed:' .. ARGV[i + 1])
end
for group, size in pairs(sizes) do
  redis.call('HSET', GROUPS, group, size .. ':decided')
end
redis.call('HINCRBY', COUNTS, 'planned', -#ids)
redis.call('HINCRBY', COUNTS, 'sealed', #ids - num_dead)
redis.call('HINCRBY', COUNTS, 'dead', num_dead)
redis.call('HINCRBY', COUNTS, 'dead_bytes', string.format('%.0f', dead_bytes))
if num_bytes > 0 then
  redis.call('HINCRBY', BUDGET, 'planned', string.format('%.0f', -num_bytes))
  redis.call('HINCRBY', BUDGET, 'stored', string.format('%.0f', num_bytes))
end

-- 3. Remove the plans.
local kept = redis.call('XRANGE', PLAN, '-', string.format('(%.0f-0', first))
redis.call('DEL', PLAN)
for _, entry in ipairs(kept) do
  redis.call('XADD', PLAN, entry[1], unpack(entry[2]))
end
for step = first, newest do
  redis.call('HDEL', BATCHES, string.format('%.0f', step))
  redis.call('HDEL', TIMES, string.format('planned:%.0f', step))
end
local revision, through = string.match(withdrawn or '0:0', '^(%d+):(%d+)$')
redis.call('HSET', FRONTIER, 'planned', string.format('%.0f', first - 1), 'session_epoch', epoch + 1,
  'session', '', 'session_ms', since, 'replanned', ARGV[2] .. ':' .. ARGV[10],
  'withdrawn', string.format('%.0f:%.0f', revision + 1, math.max(newest, tonumber(through))))
redis.call('HDEL', FRONTIER, 'replan', 'damaged', 'finished')
local num_planned = redis.call('HINCRBY', FRONTIER, 'planned_groups', -num_groups)
local ever, live, at_plans = unpack(
  redis.call('HMGET', FRONTIER, 'opened_groups', 'live_groups', 'at_plans'))
local stand = {}
for plan in string.gmatch(at_plans or '', '[^,]+') do
  if tonumber(string.match(plan, '^%d+')) < first then
    stand[#stand + 1] = plan
  end
end
if #stand == 0 then
  stand[1] = string.format('%.0f:%.0f:%.0f', first - 1, ever - live, num_planned)
end
redis.call('HSET', FRONTIER, 'at_plans', table.concat(stand, ','))

-- 4. Configs that were in force from a later step on apply from the first withdrawn step on.
local function first_step(number)
  return tonumber(redis.call('HGET', CONFIG, string.format('from:%.0f', number)))
end

-- A short step counted fewer groups than its config says, see write_manifest.lua.
local usual, number = 0, newest_config
for step = newest, first, -1 do
  while number > 1 and first_step(number) > step do
    number = number - 1
  end
  usual = usual + batch_groups[number]
end
if num_groups ~= usual then
  redis.call('HINCRBY', FRONTIER, 'revised_groups', string.format('%.0f', usual - num_groups))
end
for number = 2, newest_config do
  local from = first_step(number)
  if from > first then
    local fewer = batch_groups[number - 1] - batch_groups[number]
    redis.call('HINCRBY', FRONTIER, 'revised_groups',
      string.format('%.0f', (first - from) * fewer + 0))  -- no "-0"
    redis.call('HSET', CONFIG, string.format('from:%.0f', number), string.format('%.0f', first))
  end
end

-- 5. Reset the observers, the snapshot and waiting callers.
local observers = redis.call('HGETALL', OBSERVERS)
for i = 1, #observers, 2 do
  local seen, rest = string.match(observers[i + 1], '^(%d+)(:.*)$')
  if seen and tonumber(seen) >= first then
    redis.call('HSET', OBSERVERS, observers[i], string.format('%.0f', first - 1) .. rest)
  end
end
local before = redis.call('HGET', SNAPSHOT, 'position') or '0-0'
if before ~= ARGV[7] then
  redis.call('HSET', SNAPSHOT, 'before', before)
end
redis.call('HSET', SNAPSHOT, 'position', ARGV[7], 'step', string.format('%.0f', first - 1), 'record',
  ARGV[8], 'withdrawn_at', ARGV[7])
redis.call('XADD', EVENTS, '*', 'r', ARGV[9])
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return 1
