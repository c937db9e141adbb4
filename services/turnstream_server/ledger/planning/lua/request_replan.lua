#!lua flags=allow-oom
-- Requests a replan, if no request is pending.
-- Arguments: ARGV[1] name of the request
-- Reply:     the name of the pending request

local FRONTIER, WAKE = unpack(KEYS)
if redis.call('EXISTS', FRONTIER) == 0 then
  return redis.error_reply('NORUN no such run')
end
if redis.call('HSETNX', FRONTIER, 'replan', ARGV[1]) == 1 then
  redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
end
return redis.call('HGET', FRONTIER, 'replan')
