#!lua flags=allow-oom
-- Closes a run: no new group, while those that are open may still be finished.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash    changed: closed becomes 1; leftover, the rule for groups that make no
--                             whole batch
--   KEYS[2] events    stream  added: field r = the run_closed record
--   KEYS[3] wake      stream  added, to wake waiting callers
-- Arguments: ARGV[1] the record    ARGV[2] short, carry or drop; "" or nothing: short, and any where
--            the run is closed
-- Reply:     1, or 0 where the run was closed already
-- Errors:    NORUN     no such run
--            CONFLICT  it was closed with another leftover

local closed, leftover = unpack(redis.call('HMGET', KEYS[1], 'closed', 'leftover'))
if not closed then
  return redis.error_reply('NORUN no such run')
end
local wanted = ARGV[2] or ''
if closed == '1' then
  leftover = leftover or 'short'
  if wanted ~= '' and wanted ~= leftover then
    return redis.error_reply('CONFLICT the run was closed with leftover=' .. leftover .. ', not '
      .. wanted)
  end
  return 0
end
redis.call('HSET', KEYS[1], 'closed', 1, 'leftover', wanted == '' and 'short' or wanted)
redis.call('XADD', KEYS[2], '*', 'r', ARGV[1])
redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'w', '')
return 1
