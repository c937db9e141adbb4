#!lua flags=allow-oom
-- Writes the event at which the groups of a batch are chosen. Runs also when the server is full.
--
-- Arguments: ARGV[1] leader epoch    ARGV[2] the record
-- Reply:     the id of the event

local LEADER, EVENTS = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local last = redis.call('XREVRANGE', EVENTS, '+', '-', 'COUNT', 1)[1]
if last and last[2][2] == ARGV[2] then
  return last[1]
end
return redis.call('XADD', EVENTS, '*', 'r', ARGV[2])
