#!lua flags=allow-oom
-- Finishes a closed run: nothing more of it will be planned.
--
-- Arguments: ARGV[1] leader epoch    ARGV[2] id of the last event that the leader has folded in
--            ARGV[3] the record
-- Reply:     1; 0 where the run is not closed, or there are later events

local LEADER, FRONTIER, EVENTS, WAKE = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local closed, finished = unpack(redis.call('HMGET', FRONTIER, 'closed', 'finished'))
if finished == '1' then
  return 1
end
local last = redis.call('XREVRANGE', EVENTS, '+', '-', 'COUNT', 1)[1]
if closed ~= '1' or (last and last[1] ~= ARGV[2]) then
  return 0
end
redis.call('HSET', FRONTIER, 'finished', 1)
redis.call('XADD', EVENTS, '*', 'r', ARGV[3])
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return 1
