#!lua flags=allow-oom
-- Keeps an event that nobody can read as a dead letter, once.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader   hash    read: epoch
--   KEYS[2] damaged  stream  added, under the event's own id: fields r = the record, why = the reason.
--                            It takes no id that is not above all before, also after these are gone
--   KEYS[3] counts   hash    changed: dead_bytes
-- Arguments: ARGV[1] leader epoch    ARGV[2] id of the event    ARGV[3] the record    ARGV[4] why
-- Reply:     1, or 0 where it was kept before
-- Errors:    FENCED  another planner leads

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local added = redis.pcall('XADD', KEYS[2], ARGV[2], 'r', ARGV[3], 'why', ARGV[4])
if type(added) == 'table' and added.err then
  if string.find(added.err, 'equal or smaller', 1, true) then
    return 0
  end
  return added
end
redis.call('HINCRBY', KEYS[3], 'dead_bytes', #ARGV[3])
return 1
