#!lua flags=allow-oom
-- Ends sealed trajectories untrained, without their groups. Ended and planned ones stay as they
-- are.
--
-- Arguments: ARGV[1] leader epoch    ARGV[2...] three per trajectory: its id, state, reason
-- Reply:     number of trajectories that this call ended

local LEADER, LEDGER, COUNTS, DEADLINES = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local num_ended = 0

local COUNTERS = {{COUNTS}}
-- include: turnstream_server.bus.leadership/whole_counters.lua

for i = 2, #ARGV, 3 do
  local entry = redis.call('HGET', LEDGER, ARGV[i])
  local state = string.match(entry or '', '^[^:]*')
  if state == 'sealed' or state == 'awaiting_reward' then
    redis.call('HSET', LEDGER, ARGV[i], ARGV[i + 1] .. ':' .. ARGV[i + 2])
    redis.call('HINCRBY', COUNTS, state, -1)
    redis.call('HINCRBY', COUNTS, ARGV[i + 1], 1)
    redis.call('ZREM', DEADLINES, 'reward:' .. ARGV[i])
    num_ended = num_ended + 1
  end
end
return num_ended
