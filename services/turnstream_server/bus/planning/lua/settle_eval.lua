#!lua flags=allow-oom
-- Ends a group of an evaluation, once, and stores its result. The other trajectories become
-- surplus.
--
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] group name
--   ARGV[3] reason of those that count    ARGV[4] reason of those that do not
--   ARGV[5] record of the group, or ""    ARGV[6] its version, or "unknown"
--   ARGV[7] record of the version with this group, or "" where it is final
--   ARGV[8...] ids of the trajectories that count
-- Reply: number of trajectories that this call ended
-- Errors:    CONFLICT  no such group, or not one to evaluate

local LEADER, GROUPS, LEDGER, COUNTS, MEMBERS, REFILLS, DEADLINES, LEASES, EVALS, EVALGROUPS, HELD,
  BUDGET, WAKE = unpack(KEYS)
local MAX_VERSIONS = 1000
local MAX_GROUPS = 10000

-- include: turnstream_server.bus.leadership/fenced.lua

local num_samples, state = string.match(redis.call('HGET', GROUPS, ARGV[2]) or '', '^(%d+):(.*)$')
if state == 'evaluated' then
  return 0
end
if state ~= 'evaluating' then
  return redis.error_reply('CONFLICT group ' .. ARGV[2] .. ' is ' .. (state or 'unknown, or finished')
    .. ', not evaluating')
end

local COUNTERS = {{COUNTS}, {BUDGET}}
-- include: turnstream_server.bus.leadership/whole_counters.lua
-- include: end_members.lua

local counted = {}
for i = 8, #ARGV do
  counted[#counted + 1] = ARGV[i]
end
settle_all(counted, {sealed = 'evaluated', awaiting_reward = 'evaluated'}, ARGV[3])
-- A sealed trajectory does not count where its reward came after the deadline.
local surplus = {open = 'surplus', awaiting_reward = 'surplus', sealed = 'surplus'}
if settle_rest(ARGV[2], num_samples, surplus, ARGV[4]) > 0 then
  redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
end
count_ended()
redis.call('HSET', GROUPS, ARGV[2], num_samples .. ':evaluated')
redis.call('HDEL', MEMBERS, ARGV[2])
redis.call('ZREM', DEADLINES, 'group:' .. ARGV[2])

local function drop_lowest_version()
  local lowest
  for _, version in ipairs(redis.call('HKEYS', EVALS)) do
    local number = tonumber(version) or -1
    if not lowest or number < (tonumber(lowest) or -1) then
      lowest = version
    end
  end
  redis.call('HDEL', EVALS, lowest)
end

if ARGV[5] ~= '' then
  redis.call('XADD', EVALGROUPS, 'MAXLEN', '~', MAX_GROUPS, '*', 'r', ARGV[5])
end
if ARGV[7] ~= '' then
  redis.call('HSET', EVALS, ARGV[6], ARGV[7])
  if redis.call('HLEN', EVALS) > MAX_VERSIONS then
    drop_lowest_version()
  end
end
return num_ended
