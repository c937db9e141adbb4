#!lua flags=allow-oom
-- Parks a run in which nothing can expire: releases its leadership, and records the position of its
-- planner in the two streams that every later change writes to. Any later entry, also one that the
-- planner has not read yet, makes a planner lead the run again.
--
-- Arguments: ARGV[1] leader epoch    ARGV[2] the last event id that the planner has read
--            ARGV[3] the last wake id that it has read; "0-0" for none
-- Reply:     1 if the run is parked, 0 if something in it can expire

local LEADER, LEASES, DEADLINES, OBSERVERS, CLOCK = unpack(KEYS)

-- include: turnstream.store.run/run_clock.lua
-- include: turnstream_server.bus.leadership/fenced.lua

if redis.call('ZCARD', LEASES) > 0 or redis.call('ZCARD', DEADLINES) > 0 then
  return 0
end
for _, entry in ipairs(redis.call('HVALS', OBSERVERS)) do
  if string.match(entry, '^%d+:(%d+):') ~= '0' then
    return 0
  end
end
local now_ms = now_text()
redis.call('HSET', CLOCK, 'ms', string.format('%.0f', run_ms()), 'at_ms', now_ms, 'most_ms', 0)
redis.call('HSET', LEADER, 'expires_ms', now_ms, 'parked', ARGV[2] .. ' ' .. ARGV[3])
return 1
