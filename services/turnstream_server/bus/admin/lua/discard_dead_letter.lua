#!lua flags=allow-oom
-- Ends a dead letter for good: its reason stays, its payload may go.
--
-- No fence: repeated calls, by any process, have the same effect.
--
-- Keys, all in the run's slot:
--   KEYS[1] ledger   hash  trajectory id: "dead:<reason>" becomes "dead:discarded<why>: <reason>"
--   KEYS[2] letters  hash  removed: the trajectory id
--   KEYS[3] counts   hash  changed: discarded, dead_bytes
-- Arguments: ARGV[1] trajectory id    ARGV[2] why, behind the word; may be empty
-- Reply:     1, or 0 where it was discarded before
-- Errors:    CONFLICT  it is not dead

local entry = redis.call('HGET', KEYS[1], ARGV[1])
local state = string.match(entry or '', '^[^:]*')
if state ~= 'dead' then
  return redis.error_reply('CONFLICT ' .. ARGV[1] .. ' is ' .. (entry or 'unknown, or over')
    .. ', not dead')
end
local letter = redis.call('HGET', KEYS[2], ARGV[1])
if not letter then
  return 0
end

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(KEYS[3])
if damage then
  return damage
end
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], 'dead:discarded' .. ARGV[2] .. ': ' .. string.sub(entry, 6))
redis.call('HINCRBY', KEYS[3], 'discarded', 1)
redis.call('HINCRBY', KEYS[3], 'dead_bytes', 0 - string.match(letter, '^%d+:(%d+)'))
return 1
