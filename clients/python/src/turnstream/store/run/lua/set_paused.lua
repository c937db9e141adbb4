#!lua flags=allow-oom
-- Pauses or resumes a run. A paused run takes no new group and plans no batch; open groups may be
-- finished, and planned batches are delivered.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash    changed: paused, the reason; gone where the run is not paused
--   KEYS[2] wake      stream  added, to wake waiting callers
-- Arguments: ARGV[1] 1 to pause, 0 to resume    ARGV[2] the reason
-- Reply:     1, or 0 where nothing was to do
-- Errors:    NORUN  no such run

if redis.call('EXISTS', KEYS[1]) == 0 then
  return redis.error_reply('NORUN no such run')
end
local was_paused = redis.call('HGET', KEYS[1], 'paused')
if ARGV[1] == '1' then
  if was_paused then
    return 0
  end
  redis.call('HSET', KEYS[1], 'paused', ARGV[2])
else
  if not was_paused then
    return 0
  end
  redis.call('HDEL', KEYS[1], 'paused')
end
redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'w', '')
return 1
