#!lua flags=allow-oom
-- Decides a group. Dropped as "filtered", "expired", "incomplete" or "surplus" it is over, its sealed
-- trajectories with it, and another group may be opened in its place. As "decided" it is ready, and
-- takes no more samples. Either way nobody waits for what is still open: it becomes surplus.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash    read: epoch
--   KEYS[2] groups    hash    group name -> "<num_samples>:<state>", open or decided; changed. One
--                             that is gone is over
--   KEYS[3] ledger    hash    trajectory id: "sealed:<epoch>" and "awaiting_reward:<epoch>" become
--                             "<state>:<reason>"; "open:..." becomes "surplus:<reason>"
--   KEYS[4] counts    hash    changed: open, sealed, awaiting_reward, surplus, and the state
--   KEYS[5] frontier  hash    changed: live_groups, open_groups
--   KEYS[6] wake      stream  added, to wake waiting callers
--   KEYS[7] members   hash    read: "<num_needed>:<highest attempt>:<refills granted>:..."; removed
--                             with the group
--   KEYS[8] deadlines zset    removed: those of the group and of its trajectories
--   KEYS[9] refills   zset    removed: those of the group
--   KEYS[10] leases   zset    removed: those of trajectories that were open
--   KEYS[11] config   hash    read: newest, and that revision's JSON
--   KEYS[12] tasks    hash    removed: the group, where a prompt of the run was given out as it
--   KEYS[13] prompts  hash    that prompt is done, where the group was filtered: removed; changed:
--                             done, filtered
--   KEYS[14] again    zset    added: the number of that prompt, where the group failed
--   KEYS[15] held     hash    removed: samples that were never opened
--   KEYS[16] budget   hash    changed: reserved
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] group name
--   ARGV[3] filtered, expired, incomplete, surplus or decided    ARGV[4] reason
--   ARGV[5] refills of the group that were granted before it was decided
--   ARGV[6...] ids of the group's sealed trajectories that are dropped
-- Reply: how many trajectories were ended now, an integer; 0 the second time, and where a refill was
--        granted since it was decided: that opened the group again
-- Errors:
--   FENCED    another planner leads
--   CONFLICT  no such group; or one is dropped that is planned, or was dropped otherwise
--   DAMAGED   the entry of the group in members is damaged: nothing was written

local MEMBERS, DEADLINES, REFILLS, LEASES, CONFIG = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local TASKS, PROMPTS, AGAIN, HELD, BUDGET = KEYS[12], KEYS[13], KEYS[14], KEYS[15], KEYS[16]

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local num_samples, state = string.match(redis.call('HGET', KEYS[2], ARGV[2]) or '', '^(%d+):(.*)$')
local is_dropped = ARGV[3] ~= 'decided'
if state == ARGV[3] or (not is_dropped and state ~= 'open') then
  return 0  -- whoever folds the events again decides again what went on long ago
end
local attempts, granted = string.match(redis.call('HGET', MEMBERS, ARGV[2]) or ':0:0:',
  '^%d*:(%d+):(%d+):')
if not attempts then
  return redis.error_reply('DAMAGED ' .. MEMBERS .. ", field '" .. ARGV[2] .. "' is no entry of members")
end
if not is_dropped and tonumber(granted) > tonumber(ARGV[5]) then
  return 0  -- a call that comes late
end
if state ~= 'open' and state ~= 'decided' then
  return redis.error_reply('CONFLICT group ' .. ARGV[2] .. ' is ' .. (state or 'unknown, or over'))
end

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(KEYS[4]) or damaged(BUDGET) or damaged(PROMPTS, 'done', 'filtered')
  or damaged(KEYS[5], 'live_groups', 'open_groups')
if damage then
  return damage
end

local config = cjson.decode(redis.call('HGET', CONFIG, redis.call('HGET', CONFIG, 'newest')))
local num = {open = 0, sealed = 0, awaiting_reward = 0, surplus = 0, [ARGV[3]] = 0}
local num_ended = 0

local function settle(id, from, into)
  redis.call('HSET', KEYS[3], id, into .. ':' .. ARGV[4])
  redis.call('ZREM', DEADLINES, 'reward:' .. id)
  redis.call('ZREM', LEASES, id)
  num[from] = num[from] - 1
  num[into] = num[into] + 1
  num_ended = num_ended + 1
end

-- include: give_back_unbegun.lua

local function state_of(id)
  return string.match(redis.call('HGET', KEYS[3], id) or '', '^[^:]*')
end

for i = 6, #ARGV do
  if state_of(ARGV[i]) == 'sealed' then
    settle(ARGV[i], 'sealed', ARGV[3])
  end
end
for sample = 0, num_samples - 1 do
  for attempt = 0, tonumber(attempts) do
    local id = ARGV[2] .. '/' .. sample .. '/' .. attempt
    local from = state_of(id)
    if from == 'open' then
      settle(id, from, 'surplus')
    elseif from == 'awaiting_reward' then
      settle(id, from, is_dropped and ARGV[3] or 'surplus')
    elseif from == '' then
      give_back(id)
    end
    if attempt > 0 then
      redis.call('ZREM', REFILLS, id)
    end
  end
end
for name, number in pairs(num) do
  if number ~= 0 then
    redis.call('HINCRBY', KEYS[4], name, number)
  end
end
redis.call('HSET', KEYS[2], ARGV[2], num_samples .. ':' .. ARGV[3])
redis.call('ZREM', DEADLINES, 'group:' .. ARGV[2])
if is_dropped then
  redis.call('HDEL', MEMBERS, ARGV[2])
  redis.call('HINCRBY', KEYS[5], 'live_groups', -1)
end
local prompt = is_dropped and redis.call('HGET', TASKS, ARGV[2])
if prompt then
  redis.call('HDEL', TASKS, ARGV[2])
  if ARGV[3] == 'filtered' then
    redis.call('HDEL', PROMPTS, prompt)
    redis.call('HINCRBY', PROMPTS, 'done', 1)
    redis.call('HINCRBY', PROMPTS, 'filtered', 1)
  else
    redis.call('ZADD', AGAIN, prompt, prompt)
  end
end
local makes_room = is_dropped or given_back > 0
if state == 'open' then
  redis.call('HINCRBY', KEYS[5], 'open_groups', -1)
  makes_room = makes_room or (config.max_open_groups or 0) > 0
end
if makes_room then
  redis.call('XADD', KEYS[6], 'MAXLEN', 1, '*', 'w', '')
end
return num_ended
