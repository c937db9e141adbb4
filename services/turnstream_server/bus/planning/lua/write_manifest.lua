#!lua flags=allow-oom
-- Writes the plan of one batch and moves its trajectories to "planned", all or nothing. Open ones
-- of its groups, and those without their reward, become surplus. Runs also when the server is full:
-- only plans lead to releases.
--
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] step    ARGV[3] manifest hash    ARGV[4] hash before, or ""
--   ARGV[5] record          ARGV[6] revision of the config that it was planned with
--   ARGV[7] lineage that the plan names    ARGV[8...] trajectory ids
-- Reply: 1; 0 where this manifest was written before; -1 where the step must be planned again,
--        because the run is paused, or the step has another config or lineage: nothing was written
-- Errors:
--   CONFLICT  the step has another manifest, is not the next one, does not continue the chain, has
--             another config in force, or names a trajectory that is not sealed, or a finished
--             group

local LEADER, FRONTIER, BATCHES, PLAN, LEDGER, COUNTS, GROUPS, MEMBERS, DEADLINES, REFILLS, LEASES,
  WAKE, TASKS, PROMPTS, CONFIG, HELD, BUDGET, TIMES = unpack(KEYS)
local FIRST = 8  -- trajectory id
local CHUNK = 1000  -- unpack fails above a few thousand values

-- include: turnstream_server.bus.leadership/fenced.lua

local planned, revised, paused, lineage, withdrawn = unpack(redis.call('HMGET', FRONTIER,
  'planned', 'next_revision', 'paused', 'lineage', 'withdrawn'))
local step = tonumber(ARGV[2])
local last = tonumber(planned or 0)

local function batch(number)
  if number == 0 then
    return 0, ''
  end
  local entry = redis.call('HGET', BATCHES, string.format('%.0f', number))
  local total, hash = string.match(entry or '', '^(%d+):(.*)$')
  return tonumber(total), hash
end

if step <= last then
  local _, hash = batch(step)
  if hash == ARGV[3] then
    return 0
  end
  return redis.error_reply('CONFLICT step ' .. step .. ' is planned with the manifest '
    .. (hash or 'of a released batch'))
end
if step ~= last + 1 then
  return redis.error_reply('CONFLICT step ' .. step .. ' does not follow step ' .. last)
end
local total, last_hash = batch(last)
if last_hash ~= ARGV[4] then
  return redis.error_reply('CONFLICT step ' .. last .. ' has the manifest "' .. last_hash
    .. '", not "' .. ARGV[4] .. '"')
end

local in_force = redis.call('HGET', CONFIG, 'newest')
if in_force ~= ARGV[6] then
  return redis.error_reply('CONFLICT step ' .. step .. ' was planned with config revision ' .. ARGV[6]
    .. ', and revision ' .. in_force .. ' is in force')
end
revised = tonumber(revised or 0)
local is_revised = revised > 0 and revised <= step
if paused or is_revised or lineage ~= ARGV[7] then
  return -1
end

local COUNTERS = {{COUNTS}, {BUDGET}, {PROMPTS, 'done'}, {FRONTIER,
  'planned_groups', 'opened_groups', 'live_groups', 'open_groups'}}
-- include: turnstream_server.bus.leadership/whole_counters.lua
-- include: end_members.lua

-- 1. Check every trajectory before the first write.
local named = {}
local sizes = {}  -- group name -> num_samples
local num_open_groups = 0
for start = FIRST, #ARGV, CHUNK do
  local stop = math.min(start + CHUNK - 1, #ARGV)
  local entries = redis.call('HMGET', LEDGER, unpack(ARGV, start, stop))
  for i, entry in ipairs(entries) do
    local id = ARGV[start + i - 1]
    if not entry or string.sub(entry, 1, 7) ~= 'sealed:' then
      return redis.error_reply('CONFLICT ' .. id .. ' is ' .. (entry or 'unknown')
        .. ', not sealed')
    end
    if named[id] then
      return redis.error_reply('CONFLICT ' .. id .. ' is named twice')
    end
    named[id] = true
    local group = string.match(id, '^[^/]*')
    if not sizes[group] then
      local size, state = string.match(redis.call('HGET', GROUPS, group) or '', '^(%d+):(.*)$')
      sizes[group] = size
      num_open_groups = num_open_groups + (state == 'open' and 1 or 0)
      if not sizes[group] then
        return redis.error_reply('CONFLICT group ' .. group .. ' of ' .. id .. ' is finished')
      end
    end
  end
end

-- 2. Write.
local revision, through = string.match(withdrawn or '0:0', '^(%d+):(%d+)$')
revision = step <= tonumber(through) and revision or 0
redis.call('XADD', PLAN, ARGV[2] .. '-' .. revision, 'r', ARGV[5])
local num_bytes = 0
for start = FIRST, #ARGV, CHUNK do
  local stop = math.min(start + CHUNK - 1, #ARGV)
  local changes = {}
  for i = start, stop do
    changes[#changes + 1] = ARGV[i]
    changes[#changes + 1] = 'planned:' .. ARGV[2]
  end
  for _, bytes in ipairs(redis.call('HMGET', HELD, unpack(ARGV, start, stop))) do
    num_bytes = num_bytes + (tonumber(bytes or 0) or 0)
  end
  redis.call('HSET', LEDGER, unpack(changes))
end

local becomes = {open = 'surplus', awaiting_reward = 'surplus'}
local num_groups, num_prompts = 0, 0
for group, num_samples in pairs(sizes) do
  num_groups = num_groups + 1
  settle_rest(group, num_samples, becomes, 'its group was planned without it')
  redis.call('HSET', GROUPS, group, num_samples .. ':planned')
  redis.call('HDEL', MEMBERS, group)
  redis.call('ZREM', DEADLINES, 'group:' .. group)
  local prompt = redis.call('HGET', TASKS, group)
  if prompt then
    redis.call('HDEL', TASKS, group)
    redis.call('HDEL', PROMPTS, prompt)
    redis.call('HINCRBY', PROMPTS, 'done', 1)
    num_prompts = num_prompts + 1
  end
end
count_ended()
if num_open_groups > 0 then
  redis.call('HINCRBY', FRONTIER, 'open_groups', -num_open_groups)
end
if num_open_groups > 0 or num_prompts > 0 then
  redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
end
local num_trajectories = #ARGV - FIRST + 1
redis.call('HINCRBY', COUNTS, 'sealed', -num_trajectories)
redis.call('HINCRBY', COUNTS, 'planned', num_trajectories)
redis.call('HSET', BATCHES, ARGV[2],
  string.format('%.0f:%s', total + num_trajectories, ARGV[3]))
redis.call('HSET', FRONTIER, 'planned', ARGV[2])
redis.call('HSET', TIMES, 'planned:' .. ARGV[2], now_text())
local num_planned = redis.call('HINCRBY', FRONTIER, 'planned_groups', num_groups)
local ever, live, at_plans = unpack(
  redis.call('HMGET', FRONTIER, 'opened_groups', 'live_groups', 'at_plans'))
redis.call('HSET', FRONTIER, 'at_plans', string.format('%s,%s:%.0f:%.0f',
  string.match(at_plans or '0:0:0', '[^,]+$'), ARGV[2], ever - live, num_planned))
if num_bytes > 0 then
  redis.call('HINCRBY', BUDGET, 'stored', string.format('%.0f', -num_bytes))
  redis.call('HINCRBY', BUDGET, 'planned', string.format('%.0f', num_bytes))
end
return 1
