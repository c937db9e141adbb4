#!lua flags=allow-oom
-- Requests that the leader of a run plans again from a damaged step on. The leader checks the step.
--
-- One request stands at a time, until a leader has answered it. A second caller gets its name, and
-- so its answer.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash    read: stepped; changed: replan, "<name of the request>:<step>"
--   KEYS[2] wake      stream  added, so that the leader is notified
-- Arguments: ARGV[1] name of the request    ARGV[2] the damaged step, 0 for the first that is
-- Reply:     the name of the request that stands
-- Errors:    NORUN  no such run

local stepped, standing = unpack(redis.call('HMGET', KEYS[1], 'stepped', 'replan'))
if not stepped then
  return redis.error_reply('NORUN no such run')
end
if standing then
  return string.match(standing, '^(.*):%d+$')
end
redis.call('HSET', KEYS[1], 'replan', ARGV[1] .. ':' .. ARGV[2])
redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'w', '')
return ARGV[1]
