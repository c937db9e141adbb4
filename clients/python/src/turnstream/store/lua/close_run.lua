#!lua flags=allow-oom
-- Closes a run: no new group, while those that are open may still be finished.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash    changed: closed becomes 1
--   KEYS[2] events    stream  added: field r = the run_closed record
--   KEYS[3] wake      stream  added, so that whoever waits for capacity is told
-- Arguments: ARGV[1] the record
-- Reply:     1, or 0 where the run was closed already
-- Errors:    NORUN  no such run

local closed = redis.call('HGET', KEYS[1], 'closed')
if not closed then
  return redis.error_reply('NORUN no such run')
end
if closed == '1' then
  return 0
end
redis.call('HSET', KEYS[1], 'closed', 1)
redis.call('XADD', KEYS[2], '*', 'r', ARGV[1])
redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'w', '')
return 1
