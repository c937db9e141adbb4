#!lua flags=allow-oom
-- Abandons open trajectories whose lease has ended, each with a reason. A renewed or adopted
-- trajectory stays open. If the server's clock was set back before ARGV[2], all stay open. Runs
-- also when the server is full.
--
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] latest end of a lease, ms of server time
--   ARGV[3...] four per trajectory: its id, lease epoch, reason, record
-- Reply: per trajectory, in order: 1, or 0 where it was not abandoned now

local LEADER, LEDGER, LEASES, COUNTS, EVENTS = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local until_ms = tonumber(ARGV[2])
if until_ms > server_ms() then
  until_ms = -math.huge
end

local COUNTERS = {{COUNTS}}
-- include: turnstream_server.bus.leadership/whole_counters.lua

local replies = {}
local num_abandoned = 0
for i = 3, #ARGV, 4 do
  local id = ARGV[i]
  local lease_end = tonumber(redis.call('ZSCORE', LEASES, id) or 'inf')
  local epoch = string.match(redis.call('HGET', LEDGER, id) or '', '^open:(%d+):')
  if epoch == ARGV[i + 1] and lease_end <= until_ms then
    redis.call('HSET', LEDGER, id, 'abandoned:' .. ARGV[i + 2])
    redis.call('ZREM', LEASES, id)
    redis.call('XADD', EVENTS, '*', 'r', ARGV[i + 3])
    num_abandoned = num_abandoned + 1
    replies[#replies + 1] = 1
  else
    replies[#replies + 1] = 0
  end
end
if num_abandoned > 0 then
  redis.call('HINCRBY', COUNTS, 'open', -num_abandoned)
  redis.call('HINCRBY', COUNTS, 'abandoned', num_abandoned)
end
return replies
