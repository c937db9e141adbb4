#!lua flags=allow-oom
-- Reopens a closed run: it takes groups again, and carried groups are planned with them.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash    changed: closed becomes 0; finished and leftover go
--   KEYS[2] events    stream  added: field r = the run_reopened record
--   KEYS[3] wake      stream  added, to wake waiting callers
-- Arguments: ARGV[1] the record
-- Reply:     1, or 0 where the run was not closed
-- Errors:    NORUN  no such run

local closed = redis.call('HGET', KEYS[1], 'closed')
if not closed then
  return redis.error_reply('NORUN no such run')
end
if closed == '0' then
  return 0
end
redis.call('HSET', KEYS[1], 'closed', 0)
redis.call('HDEL', KEYS[1], 'finished', 'leftover')
redis.call('XADD', KEYS[2], '*', 'r', ARGV[1])
redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'w', '')
return 1
