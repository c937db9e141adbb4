#!lua flags=allow-oom
-- Tells everybody that nothing more of a closed run will be planned.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash    read: epoch
--   KEYS[2] frontier  hash    read: closed; changed: finished becomes 1
--   KEYS[3] events    stream  added, once: field r = the run_finished record
--   KEYS[4] wake      stream  added, to wake waiting callers
-- Arguments: ARGV[1] leader epoch    ARGV[2] id of the last event that the leader has folded in
--            ARGV[3] the record
-- Reply:     1; 0 where the run is not closed, or there are later events
-- Errors:    FENCED  another planner leads

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local closed, finished = unpack(redis.call('HMGET', KEYS[2], 'closed', 'finished'))
if finished == '1' then
  return 1
end
local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)[1]
if closed ~= '1' or (last and last[1] ~= ARGV[2]) then
  return 0
end
redis.call('HSET', KEYS[2], 'finished', 1)
redis.call('XADD', KEYS[3], '*', 'r', ARGV[3])
redis.call('XADD', KEYS[4], 'MAXLEN', 1, '*', 'w', '')
return 1
