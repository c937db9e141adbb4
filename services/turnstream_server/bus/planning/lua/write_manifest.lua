#!lua flags=allow-oom
-- Writes the plan of one batch and moves its trajectories to "planned", all or nothing. What is
-- still open of its groups, or waits for a reward, becomes surplus.
--
-- Runs also when the server is full: without a plan nothing could ever be released.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash    read: epoch
--   KEYS[2] frontier  hash    read and changed: planned, the number of the newest batch; read:
--                             next_revision, paused, lineage, withdrawn, opened_groups, live_groups;
--                             changed: open_groups, planned_groups, at_plans; revised_groups, where
--                             the batch has other than batch_groups groups
--   KEYS[3] batches   hash    step -> "<trajectories planned up to it>:<manifest hash>"; added
--   KEYS[4] plan      stream  added: "<step>-<revision>", field r = record; the revision is
--                             0, but for steps whose plan was withdrawn
--   KEYS[5] ledger    hash    trajectory id: "sealed:<epoch>" becomes "planned:<step>"
--   KEYS[6] counts    hash    changed: sealed, planned (cumulative: stepped ones stay in it), open,
--                             awaiting_reward, surplus
--   KEYS[7] groups    hash    group name -> "<num_samples>:<state>" becomes "<num_samples>:planned";
--                             a missing one is finished
--   KEYS[8] members   hash    read: "<num_needed>:<highest attempt>:..."; removed with its group
--   KEYS[9] deadlines zset    removed: those of the groups and of their trajectories
--   KEYS[10] refills  zset    removed: those of the groups
--   KEYS[11] leases   zset    removed: those of trajectories that were open
--   KEYS[12] wake     stream  added, to wake waiting callers
--   KEYS[13] tasks    hash    removed: groups as which prompts of the run were given out
--   KEYS[14] prompts  hash    removed: these prompts, which are done; changed: done
--   KEYS[15] config   hash    read: newest, and that revision's JSON
--   KEYS[16] held     hash    read; removed: samples that were never opened
--   KEYS[17] budget   hash    changed: reserved, stored, planned
--   KEYS[18] times    hash    "planned:<step>" -> server ms; added
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] step    ARGV[3] manifest hash    ARGV[4] hash before, or ""
--   ARGV[5] record          ARGV[6] revision of the config that it was planned with
--   ARGV[7] lineage that the plan names    ARGV[8...] trajectory ids
-- Reply: 1; 0 where this very manifest was written before; -1 where the step must be planned again
--        and nothing was written, as the run is paused, the step has got another config, or the
--        trainer went back to another lineage
-- Errors:
--   NORUN     no such run
--   FENCED    another planner leads
--   CONFLICT  the step has another manifest, is not the next one, does not continue the chain, was
--             planned with a config that is not in force, or names a trajectory that is not sealed,
--             or whose group is over

local MEMBERS, DEADLINES, REFILLS, LEASES = KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local TASKS, PROMPTS, HELD, BUDGET = KEYS[13], KEYS[14], KEYS[16], KEYS[17]
local FIRST = 8  -- trajectory id
local CHUNK = 1000  -- unpack fails above a few thousand values

local stepped, planned, revised, paused, lineage, withdrawn = unpack(redis.call('HMGET', KEYS[2],
  'stepped', 'planned', 'next_revision', 'paused', 'lineage', 'withdrawn'))
if not stepped then
  return redis.error_reply('NORUN no such run')
end
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local step = tonumber(ARGV[2])
local last = tonumber(planned or 0)

local function batch(number)
  if number == 0 then
    return 0, ''
  end
  local entry = redis.call('HGET', KEYS[3], string.format('%.0f', number))
  local total, hash = string.match(entry or '', '^(%d+):(.*)$')
  return tonumber(total), hash
end

if step <= last then
  local _, hash = batch(step)
  if hash == ARGV[3] then
    return 0
  end
  -- A call that comes so late that its batch is over finds no hash any more.
  return redis.error_reply('CONFLICT step ' .. step .. ' is planned with the manifest '
    .. (hash or 'of a batch that is over'))
end
if step ~= last + 1 then
  return redis.error_reply('CONFLICT step ' .. step .. ' does not follow step ' .. last)
end
local total, last_hash = batch(last)
if last_hash ~= ARGV[4] then
  return redis.error_reply('CONFLICT step ' .. last .. ' has the manifest "' .. last_hash
    .. '", not "' .. ARGV[4] .. '"')
end

local in_force = redis.call('HGET', KEYS[15], 'newest')
if in_force ~= ARGV[6] then
  return redis.error_reply('CONFLICT step ' .. step .. ' was planned with config revision ' .. ARGV[6]
    .. ', and revision ' .. in_force .. ' is in force')
end
local batch_groups = cjson.decode(redis.call('HGET', KEYS[15], in_force)).batch_groups
revised = tonumber(revised or 0)
local is_revised = revised > 0 and revised <= step
if paused or is_revised or lineage ~= ARGV[7] then
  return -1
end

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(KEYS[6]) or damaged(BUDGET) or damaged(PROMPTS, 'done')
  or damaged(KEYS[2], 'planned_groups', 'opened_groups', 'live_groups', 'open_groups', 'revised_groups')
if damage then
  return damage
end

-- 1. Nothing is written before every trajectory has been looked at.
local named = {}
local sizes = {}  -- group name -> num_samples
local num_open_groups = 0
for start = FIRST, #ARGV, CHUNK do
  local stop = math.min(start + CHUNK - 1, #ARGV)
  local entries = redis.call('HMGET', KEYS[5], unpack(ARGV, start, stop))
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
      local size, state = string.match(redis.call('HGET', KEYS[7], group) or '', '^(%d+):(.*)$')
      sizes[group] = size
      num_open_groups = num_open_groups + (state == 'open' and 1 or 0)
      if not sizes[group] then
        return redis.error_reply('CONFLICT group ' .. group .. ' of ' .. id .. ' is over')
      end
    end
  end
end

-- 2. Write.
local revision, through = string.match(withdrawn or '0:0', '^(%d+):(%d+)$')
revision = step <= tonumber(through) and revision or 0
redis.call('XADD', KEYS[4], ARGV[2] .. '-' .. revision, 'r', ARGV[5])
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
  redis.call('HSET', KEYS[5], unpack(changes))
end
local num_left = {open = 0, awaiting_reward = 0}

-- include: give_back_unbegun.lua

local num_groups, num_prompts = 0, 0

local function leave_out(id)
  local state = string.match(redis.call('HGET', KEYS[5], id) or '', '^[^:]*')
  if num_left[state] then
    num_left[state] = num_left[state] + 1
    redis.call('HSET', KEYS[5], id, 'surplus:its group was planned without it')
    redis.call('ZREM', DEADLINES, 'reward:' .. id)
    redis.call('ZREM', LEASES, id)
  elseif state == '' then
    give_back(id)
  end
end

for group, num_samples in pairs(sizes) do
  num_groups = num_groups + 1
  local attempts = string.match(redis.call('HGET', MEMBERS, group) or '', '^%d+:(%d+)') or 0
  for sample = 0, num_samples - 1 do
    for attempt = 0, tonumber(attempts) do
      local id = group .. '/' .. sample .. '/' .. attempt
      leave_out(id)
      if attempt > 0 then
        redis.call('ZREM', REFILLS, id)
      end
    end
  end
  redis.call('HSET', KEYS[7], group, num_samples .. ':planned')
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
for state, number in pairs(num_left) do
  if number > 0 then
    redis.call('HINCRBY', KEYS[6], state, -number)
    redis.call('HINCRBY', KEYS[6], 'surplus', number)
  end
end
if num_open_groups > 0 then
  redis.call('HINCRBY', KEYS[2], 'open_groups', -num_open_groups)
end
if num_open_groups > 0 or num_prompts > 0 then  -- generators may start groups, or learn the end
  redis.call('XADD', KEYS[12], 'MAXLEN', 1, '*', 'w', '')
end
local num_trajectories = #ARGV - FIRST + 1
redis.call('HINCRBY', KEYS[6], 'sealed', -num_trajectories)
redis.call('HINCRBY', KEYS[6], 'planned', num_trajectories)
redis.call('HSET', KEYS[3], ARGV[2],
  string.format('%.0f:%s', total + num_trajectories, ARGV[3]))
redis.call('HSET', KEYS[2], 'planned', ARGV[2])
local time = redis.call('TIME')
redis.call('HSET', KEYS[18], 'planned:' .. ARGV[2],
  string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
local num_planned = redis.call('HINCRBY', KEYS[2], 'planned_groups', num_groups)
local ever, live, at_plans = unpack(
  redis.call('HMGET', KEYS[2], 'opened_groups', 'live_groups', 'at_plans'))
redis.call('HSET', KEYS[2], 'at_plans', string.format('%s,%s:%.0f:%.0f',
  string.match(at_plans or '0:0:0', '[^,]+$'), ARGV[2], ever - live, num_planned))
if num_groups ~= batch_groups then
  redis.call('HINCRBY', KEYS[2], 'revised_groups', num_groups - batch_groups)
end
if num_bytes > 0 then
  redis.call('HINCRBY', BUDGET, 'stored', string.format('%.0f', -num_bytes))
  redis.call('HINCRBY', BUDGET, 'planned', string.format('%.0f', num_bytes))
end
return 1
