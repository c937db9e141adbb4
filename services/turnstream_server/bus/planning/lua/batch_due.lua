#!lua flags=allow-oom
-- Tells the plan that the groups of a batch are chosen from what came before this event.
--
-- Runs also when the server is full: without a plan nothing could ever be released.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader  hash    read: epoch
--   KEYS[2] events  stream  added: field r = the batch_due record, unless it is the last entry
-- Arguments: ARGV[1] leader epoch    ARGV[2] the record
-- Reply:     the id of the event
-- Errors:    FENCED  another planner leads

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if last and last[2][2] == ARGV[2] then
  return last[1]
end
return redis.call('XADD', KEYS[2], '*', 'r', ARGV[2])
