#!lua flags=allow-oom
-- Decides a group. A dropped group is finished, with its sealed trajectories, and another group may
-- be opened in its place. A "decided" group is ready, and takes no more samples. In both cases open
-- trajectories become surplus.
--
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] group name
--   ARGV[3] filtered, expired, incomplete, surplus or decided    ARGV[4] reason
--   ARGV[5] refills of the group that were granted before it was decided
--   ARGV[6...] ids of the group's sealed trajectories that are dropped
-- Reply: number of trajectories that this call ended; 0 where a later refill has opened the group
--        again
-- Errors:
--   CONFLICT  no such group; or a planned one, or one dropped otherwise, is dropped
--   DAMAGED   the entry of the group in members is damaged: nothing was written

local LEADER, GROUPS, LEDGER, COUNTS, FRONTIER, WAKE, MEMBERS, DEADLINES, REFILLS, LEASES, CONFIG,
  TASKS, PROMPTS, AGAIN, HELD, BUDGET = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local num_samples, state = string.match(redis.call('HGET', GROUPS, ARGV[2]) or '', '^(%d+):(.*)$')
local is_dropped = ARGV[3] ~= 'decided'
if state == ARGV[3] or (not is_dropped and state ~= 'open') then
  return 0  -- decided before: a planner folds the events again
end
local granted = string.match(redis.call('HGET', MEMBERS, ARGV[2]) or ':0:0:', '^%d*:%d+:(%d+):')
if not granted then
  return redis.error_reply('DAMAGED ' .. MEMBERS .. ", field '" .. ARGV[2]
    .. "' is no entry of members")
end
if not is_dropped and tonumber(granted) > tonumber(ARGV[5]) then
  return 0  -- a late call
end
if state ~= 'open' and state ~= 'decided' then
  return redis.error_reply('CONFLICT group ' .. ARGV[2] .. ' is ' .. (state or 'unknown, or finished'))
end

local COUNTERS = {{COUNTS}, {BUDGET}, {PROMPTS, 'done', 'filtered'},
  {FRONTIER, 'live_groups', 'open_groups'}}
-- include: turnstream_server.bus.leadership/whole_counters.lua

local config = cjson.decode(redis.call('HGET', CONFIG, redis.call('HGET', CONFIG, 'newest')))
-- include: end_members.lua

local dropped = {}
for i = 6, #ARGV do
  dropped[#dropped + 1] = ARGV[i]
end
settle_all(dropped, {sealed = ARGV[3]}, ARGV[4])
local becomes = {open = 'surplus', awaiting_reward = is_dropped and ARGV[3] or 'surplus'}
local released = settle_rest(ARGV[2], num_samples, becomes, ARGV[4])
count_ended()
redis.call('HSET', GROUPS, ARGV[2], num_samples .. ':' .. ARGV[3])
redis.call('ZREM', DEADLINES, 'group:' .. ARGV[2])
if is_dropped then
  redis.call('HDEL', MEMBERS, ARGV[2])
  redis.call('HINCRBY', FRONTIER, 'live_groups', -1)
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
local frees_capacity = is_dropped or released > 0
if state == 'open' then
  redis.call('HINCRBY', FRONTIER, 'open_groups', -1)
  frees_capacity = frees_capacity or (config.max_open_groups or 0) > 0
end
if frees_capacity then
  redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
end
return num_ended
