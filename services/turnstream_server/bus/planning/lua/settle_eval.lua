#!lua flags=allow-oom
-- Ends a group of an evaluation, once, and stores its result. Open trajectories become surplus.
--
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] group name
--   ARGV[3] reason of those that count    ARGV[4] reason of those that do not
--   ARGV[5] record of the group, or ""    ARGV[6] its version, or "unknown"
--   ARGV[7] record of the version with this group, or "" where it is final
--   ARGV[8...] ids of the trajectories that count
-- Reply: number of trajectories that this call ended
-- Errors:    CONFLICT  no such group, or not one to evaluate

local LEADER, GROUPS, LEDGER, COUNTS, MEMBERS, DEADLINES, LEASES, EVALS, EVALGROUPS, HELD, BUDGET,
  WAKE = unpack(KEYS)
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
-- include: give_back_unbegun.lua

for i = 8, #ARGV do
  local from = state_of(ARGV[i])
  if from == 'sealed' or from == 'awaiting_reward' then
    settle(ARGV[i], from, 'evaluated', ARGV[3])
  end
end
local attempts = string.match(redis.call('HGET', MEMBERS, ARGV[2]) or '', '^%d+:(%d+)') or 0
for sample = 0, num_samples - 1 do
  for attempt = 0, tonumber(attempts) do
    local id = ARGV[2] .. '/' .. sample .. '/' .. attempt
    local from = state_of(id)
    -- Sealed and not counted: its reward came after the deadline.
    if from == 'open' or from == 'awaiting_reward' or from == 'sealed' then
      settle(id, from, 'surplus', ARGV[4])
    elseif from == '' then
      give_back(id)
    end
  end
end
count_ended()
redis.call('HSET', GROUPS, ARGV[2], num_samples .. ':evaluated')
redis.call('HDEL', MEMBERS, ARGV[2])
redis.call('ZREM', DEADLINES, 'group:' .. ARGV[2])
if given_back > 0 then
  redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
end

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
