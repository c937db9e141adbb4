#!lua flags=allow-oom
-- Closes or reopens a run. Open groups of a closed run may still be finished.
--
-- Arguments: ARGV[1] 1 to close, 0 to reopen    ARGV[2] the run_closed or run_reopened record
--            ARGV[3] of a close: short, carry or drop; "" for short, and for any where it is closed
-- Reply:     1, or 0 where nothing was to do

local FRONTIER, EVENTS, WAKE = unpack(KEYS)
local closed, leftover = unpack(redis.call('HMGET', FRONTIER, 'closed', 'leftover'))
if not closed then
  return redis.error_reply('NORUN no such run')
end
if closed == ARGV[1] then
  leftover = leftover or 'short'
  if closed == '1' and ARGV[3] ~= '' and ARGV[3] ~= leftover then
    return redis.error_reply('CONFLICT the run was closed with leftover=' .. leftover .. ', not '
      .. ARGV[3])
  end
  return 0
end
redis.call('HSET', FRONTIER, 'closed', ARGV[1])
if ARGV[1] == '1' then
  redis.call('HSET', FRONTIER, 'leftover', ARGV[3] == '' and 'short' or ARGV[3])
else
  redis.call('HDEL', FRONTIER, 'finished', 'leftover')
end
redis.call('XADD', EVENTS, '*', 'r', ARGV[2])
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return 1
