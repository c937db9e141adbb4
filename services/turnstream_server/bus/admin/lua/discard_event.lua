#!lua flags=allow-oom
-- Ends an event that nobody can read.
--
-- No fence: repeated calls, by any process, have the same effect.
--
-- Keys, all in the run's slot:
--   KEYS[1] damaged  stream  removed: the event; its id is never added again
--   KEYS[2] counts   hash    changed: discarded_events, dead_bytes
-- Arguments: ARGV[1] id of the event
-- Reply:     1, or 0 where it was discarded before

local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not found then
  return 0
end

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(KEYS[2])
if damage then
  return damage
end
redis.call('XDEL', KEYS[1], ARGV[1])
redis.call('HINCRBY', KEYS[2], 'discarded_events', 1)
redis.call('HINCRBY', KEYS[2], 'dead_bytes', -#found[2][2])
return 1
