#!lua flags=allow-oom
-- Refuses a request to plan again.
--
-- Arguments: ARGV[1] leader epoch    ARGV[2] name of the request    ARGV[3] the answer, JSON
-- Reply:     1, or 0 where the request is not pending

local LEADER, FRONTIER, WAKE = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

if redis.call('HGET', FRONTIER, 'replan') ~= ARGV[2] then
  return 0
end
redis.call('HDEL', FRONTIER, 'replan')
redis.call('HSET', FRONTIER, 'replanned', ARGV[2] .. ':' .. ARGV[3])
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return 1
