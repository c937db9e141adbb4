#!lua flags=allow-oom
-- Requests that the leader of a run plans again from a damaged step on. The leader checks the step.
-- A run has one pending request at a time.
--
-- Arguments: ARGV[1] name of the request    ARGV[2] the damaged step, 0 for the first one
-- Reply:     the name of the pending request
-- Errors:    NORUN  no such run

local FRONTIER, WAKE = unpack(KEYS)
local stepped, pending = unpack(redis.call('HMGET', FRONTIER, 'stepped', 'replan'))
if not stepped then
  return redis.error_reply('NORUN no such run')
end
if pending then
  return string.match(pending, '^(.*):%d+$')
end
redis.call('HSET', FRONTIER, 'replan', ARGV[1] .. ':' .. ARGV[2])
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return ARGV[1]
