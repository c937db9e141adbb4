#!lua flags=allow-oom
-- Parks a run in which nothing can expire: releases its leadership, and records up to which entries
-- its planner has read the two streams that every later change writes to. A later entry makes a
-- planner lead it again, also one that was written before this call and is not read yet.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader     hash    read: epoch; changed: expires_ms, now; parked, "<last event id> <last
--                              wake id>"
--   KEYS[2] leases     zset    read: how many
--   KEYS[3] deadlines  zset    read: how many
--   KEYS[4] observers  hash    read: name -> "<newest step seen>:<expires_ms, 0 once expired>:..."
--   KEYS[5] clock      hash    changed: ms, at_ms, most_ms: the run's time stands still while the
--                              run is parked, so that a deadline that is set then fires on time
-- Arguments: ARGV[1] leader epoch    ARGV[2] the last event id that the planner has read
--            ARGV[3] the last wake id that it has read; "0-0" for none
-- Reply:     1 if the run is parked, 0 if something in it can expire
-- Errors:    FENCED  another planner leads

local CLOCK = KEYS[5]
-- include: turnstream.store.run/run_clock.lua

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
if redis.call('ZCARD', KEYS[2]) > 0 or redis.call('ZCARD', KEYS[3]) > 0 then
  return 0
end
for _, entry in ipairs(redis.call('HVALS', KEYS[4])) do
  if string.match(entry, '^%d+:(%d+):') ~= '0' then
    return 0
  end
end
local time = redis.call('TIME')
local now_ms = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', CLOCK, 'ms', string.format('%.0f', run_ms()), 'at_ms', now_ms, 'most_ms', 0)
redis.call('HSET', KEYS[1], 'expires_ms', now_ms, 'parked', ARGV[2] .. ' ' .. ARGV[3])
return 1
