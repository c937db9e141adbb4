#!lua flags=allow-oom
-- Ends sealed trajectories untrained, without their groups. Ended and planned ones stay as they
-- are.
--
-- Arguments: ARGV[1] leader epoch    ARGV[2...] three per trajectory: its id, state, reason
-- Reply:     number of trajectories that this call ended

local LEADER, LEDGER, COUNTS, DEADLINES = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local COUNTERS = {{COUNTS}}
-- include: turnstream_server.bus.leadership/whole_counters.lua
-- include: end_members.lua

for i = 2, #ARGV, 3 do
  local into = ARGV[i + 1]
  settle_all({ARGV[i]}, {sealed = into, awaiting_reward = into}, ARGV[i + 2])
end
count_ended()
return num_ended
