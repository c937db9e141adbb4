#!lua flags=allow-oom
-- Removes some of the events that the snapshot before the newest includes. Other readers need the
-- newer ones.
--
-- Arguments: ARGV[1] leader epoch    ARGV[2] about how many entries to remove at most
-- Reply:     number of removed entries; 0 when all are removed

local LEADER, SNAPSHOT, EVENTS, REJECTED = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local before = redis.call('HGET', SNAPSHOT, 'before')
if not before then
  return 0
end
-- include: turnstream.store.run/slices.lua

local old = redis.call('ZRANGEBYSCORE', REJECTED, '-inf', '(' .. string.match(before, '^%d+'),
  'LIMIT', 0, ARGV[2])
write_sliced('ZREM', REJECTED, old)
return #old + redis.call('XTRIM', EVENTS, 'MINID', '~', before, 'LIMIT', ARGV[2])
