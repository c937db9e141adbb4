#!lua flags=allow-oom
-- Pauses or resumes a run.
-- Arguments: ARGV[1] 1 to pause, 0 to resume    ARGV[2] the reason
-- Reply:     1, or 0 where nothing was to do

local FRONTIER, WAKE = unpack(KEYS)
if redis.call('EXISTS', FRONTIER) == 0 then
  return redis.error_reply('NORUN no such run')
end
if tostring(redis.call('HEXISTS', FRONTIER, 'paused')) == ARGV[1] then
  return 0
elseif ARGV[1] == '1' then
  redis.call('HSET', FRONTIER, 'paused', ARGV[2])
else
  redis.call('HDEL', FRONTIER, 'paused')
end
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return 1
