#!lua flags=allow-oom
-- Removes events that the snapshot before the newest includes, a part of them. The newer ones are
-- left for whoever else reads along: no reader is slower than from one snapshot to the next.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash    read: epoch
--   KEYS[2] snapshot  hash    read: before
--   KEYS[3] events    stream  removed: entries below that position, whole nodes of the stream
--   KEYS[4] rejected  zset    removed: ids of milliseconds before that position
-- Arguments: ARGV[1] leader epoch    ARGV[2] about how many entries to remove at most
-- Reply:     how many were removed, an integer; 0 when that is all
-- Errors:    FENCED  another planner leads

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local before = redis.call('HGET', KEYS[2], 'before')
if not before then
  return 0
end
-- include: turnstream.store.run/slices.lua

local old = redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', '(' .. string.match(before, '^%d+'),
  'LIMIT', 0, ARGV[2])
write_sliced('ZREM', KEYS[4], old)
return #old + redis.call('XTRIM', KEYS[3], 'MINID', '~', before, 'LIMIT', ARGV[2])
