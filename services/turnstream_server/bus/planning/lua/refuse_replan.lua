#!lua flags=allow-oom
-- Answers a request to plan again, where nothing is to be done.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash    read: epoch
--   KEYS[2] frontier  hash    removed: replan, where it is this request; changed: refused_replan,
--                             "<name of the request>:<why>"
--   KEYS[3] wake      stream  added, to wake waiting callers
-- Arguments: ARGV[1] leader epoch    ARGV[2] name of the request    ARGV[3] why
-- Reply:     1, or 0 where the request does not stand any more
-- Errors:    FENCED  another planner leads

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local standing = redis.call('HGET', KEYS[2], 'replan') or ''
if string.match(standing, '^(.*):%d+$') ~= ARGV[2] then
  return 0
end
redis.call('HDEL', KEYS[2], 'replan')
redis.call('HSET', KEYS[2], 'refused_replan', ARGV[2] .. ':' .. ARGV[3])
redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'w', '')
return 1
