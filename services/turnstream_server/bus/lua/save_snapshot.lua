#!lua flags=allow-oom
-- Keeps what the planner knows after an event, so that its successor need not hear the events
-- before it.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash  read: epoch
--   KEYS[2] snapshot  hash  changed: position, step, record; before, the position before
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] id of the event    ARGV[3] the newest plan that it includes
--   ARGV[4] the record
-- Reply:  1
-- Errors: FENCED  another planner leads

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local before = redis.call('HGET', KEYS[2], 'position') or '0-0'
if before ~= ARGV[2] then
  redis.call('HSET', KEYS[2], 'before', before)
end
redis.call('HSET', KEYS[2], 'position', ARGV[2], 'step', ARGV[3], 'record', ARGV[4])
return 1
