#!lua flags=allow-oom
-- Withdraws the plans from a damaged step on, all or none. Damaged trajectories are dead, the
-- others are sealed again, and their groups are decided. The trainer session ends, so that no rank
-- mixes withdrawn batches with new ones. Runs also when the server is full.
--
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] name of the request    ARGV[3] the first step
--   ARGV[4] the newest step    ARGV[5] its manifest hash, which covers all plans before it
--   ARGV[6] id of the event that the snapshot includes    ARGV[7] the snapshot's record
--   ARGV[8] the plans_withdrawn record    ARGV[9] the answer, JSON
--   ARGV[10...] three per trajectory: its id; why it is dead and the trajectory_died record, or
--               its lease epoch and ""
-- Reply:     1, or 0 where it was done before
-- Errors:    CONFLICT  the request is not pending; a step is stepped; the plans are others, or name
--            trajectories that are not planned: nothing was written

local LEADER, FRONTIER, BATCHES, PLAN, LEDGER, COUNTS, GROUPS, SNAPSHOT, EVENTS, LETTERS, WAKE,
  HELD, BUDGET, CONFIG, OBSERVERS, TIMES, DEADLINES = unpack(KEYS)
local FIRST, WORDS = 10, 3  -- of trajectories

-- include: turnstream_server.bus.leadership/fenced.lua
-- include: set_dead.lua

local stepped, planned, pending, done, withdrawn, epoch = unpack(redis.call('HMGET', FRONTIER,
  'stepped', 'planned', 'replan', 'replanned', 'withdrawn', 'session_epoch'))
if string.match(done or '', '^([^:]*):') == ARGV[2] then
  return 0
end
if pending ~= ARGV[2] then
  return redis.error_reply('CONFLICT the request ' .. ARGV[2] .. ' is not pending')
end
local first, newest = tonumber(ARGV[3]), tonumber(ARGV[4])
if first <= tonumber(stepped) then
  return redis.error_reply('CONFLICT step ' .. first .. ' is stepped, and stays as it was planned')
end
local newest_entry = redis.call('HGET', BATCHES, ARGV[4]) or ''
if planned ~= ARGV[4] or string.match(newest_entry, '^%d+:(.*)$') ~= ARGV[5] then
  return redis.error_reply('CONFLICT steps ' .. first .. ' to ' .. newest .. ' have other plans')
end

-- 1. Check every trajectory and every group before the first write.
local sizes = {}  -- group name -> num_samples
local num_bytes = 0
for i = FIRST, #ARGV, WORDS do
  local id = ARGV[i]
  local entry = redis.call('HGET', LEDGER, id) or 'unknown'
  local step = tonumber(string.match(entry, '^planned:(%d+)$'))
  if not step or step < first then
    return redis.error_reply('CONFLICT ' .. id .. ' is ' .. entry .. ', not planned from step '
      .. first .. ' on')
  end
  local group = string.match(id, '^[^/]*')
  local size, state = string.match(redis.call('HGET', GROUPS, group) or '', '^(%d+):(.*)$')
  if state ~= 'planned' then
    return redis.error_reply('CONFLICT group ' .. group .. ' is ' .. (state or 'finished')
      .. ', not planned')
  end
  sizes[group] = size
  num_bytes = num_bytes + (tonumber(redis.call('HGET', HELD, id) or 0) or 0)
end
local COUNTERS = {{COUNTS}, {BUDGET}, {FRONTIER, 'session_epoch', 'planned_groups'}}
-- include: turnstream_server.bus.leadership/whole_counters.lua

-- 2. Write the states of the trajectories and groups.
local num_sealed, num_groups = 0, 0
for i = FIRST, #ARGV, WORDS do
  if ARGV[i + 2] == '' then
    redis.call('HSET', LEDGER, ARGV[i], 'sealed:' .. ARGV[i + 1])
    num_sealed = num_sealed + 1
  else
    set_dead(ARGV[i], 'planned', ARGV[i + 1], ARGV[i + 2])
  end
end
for group, size in pairs(sizes) do
  redis.call('HSET', GROUPS, group, size .. ':decided')
  num_groups = num_groups + 1
end
redis.call('HINCRBY', COUNTS, 'planned', 0 - num_sealed)
redis.call('HINCRBY', COUNTS, 'sealed', num_sealed)
redis.call('HINCRBY', BUDGET, 'planned', string.format('%.0f', 0 - num_bytes))
redis.call('HINCRBY', BUDGET, 'stored', string.format('%.0f', num_bytes))

-- 3. Remove the plans. The pass rate counts from the beginning of the run again.
local kept = redis.call('XRANGE', PLAN, '-', string.format('(%.0f-0', first))
redis.call('DEL', PLAN)
for _, entry in ipairs(kept) do
  redis.call('XADD', PLAN, entry[1], unpack(entry[2]))
end
for step = first, newest do
  redis.call('HDEL', BATCHES, string.format('%.0f', step))
  redis.call('HDEL', TIMES, string.format('planned:%.0f', step))
end
local before = string.format('%.0f', first - 1)
local revision, through = string.match(withdrawn or '0:0', '^(%d+):(%d+)$')
redis.call('HSET', FRONTIER, 'planned', before, 'session_epoch', epoch + 1, 'session', '',
  'session_ms', now_text(), 'replanned', ARGV[2] .. ':' .. ARGV[9],
  'withdrawn', string.format('%.0f:%.0f', revision + 1, math.max(newest, tonumber(through))))
redis.call('HINCRBY', FRONTIER, 'planned_groups', -num_groups)
redis.call('HDEL', FRONTIER, 'replan', 'damaged', 'finished', 'at_plans')

-- 4. Configs that were in force from a later step on apply from the first withdrawn step on.
for number = 2, tonumber(redis.call('HGET', CONFIG, 'newest')) do
  local from = string.format('from:%.0f', number)
  if tonumber(redis.call('HGET', CONFIG, from)) > first then
    redis.call('HSET', CONFIG, from, ARGV[3])
  end
end

-- 5. Reset the observers, the snapshot and waiting callers.
local observers = redis.call('HGETALL', OBSERVERS)
for i = 1, #observers, 2 do
  local seen, rest = string.match(observers[i + 1], '^(%d+)(:.*)$')
  if seen and tonumber(seen) >= first then
    redis.call('HSET', OBSERVERS, observers[i], before .. rest)
  end
end
local position = redis.call('HGET', SNAPSHOT, 'position') or '0-0'
if position ~= ARGV[6] then
  redis.call('HSET', SNAPSHOT, 'before', position)
end
redis.call('HSET', SNAPSHOT, 'position', ARGV[6], 'step', before, 'record', ARGV[7],
  'withdrawn_at', ARGV[6])
redis.call('XADD', EVENTS, '*', 'r', ARGV[8])
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return 1
