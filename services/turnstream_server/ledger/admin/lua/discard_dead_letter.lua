#!lua flags=allow-oom
-- Discards a dead letter: its reason stays, its payload may be deleted. Wakes the leader, which
-- returns the bytes to the budget. No fence: repeated calls, by any process, have the same effect.
--
-- Arguments: ARGV[1] trajectory id    ARGV[2] why, after the word; may be empty
-- Reply:     1, or 0 where it was discarded before
-- Errors:    CONFLICT  it is not dead

local LEDGER, LETTERS, COUNTS, WAKE = unpack(KEYS)
local entry = redis.call('HGET', LEDGER, ARGV[1])
if string.match(entry or '', '^[^:]*') ~= 'dead' then
  return redis.error_reply('CONFLICT ' .. ARGV[1] .. ' is ' .. (entry or 'unknown, or finished')
    .. ', not dead')
end
local letter = redis.call('HGET', LETTERS, ARGV[1])
if not letter then
  return 0
end
-- include: turnstream.store.run/whole_numbers.lua
local damage = damaged(COUNTS)
if damage then
  return damage
end

redis.call('HDEL', LETTERS, ARGV[1])
redis.call('HSET', LEDGER, ARGV[1], 'dead:discarded' .. ARGV[2] .. ': ' .. string.sub(entry, 6))
redis.call('HINCRBY', COUNTS, 'discarded', 1)
redis.call('HINCRBY', COUNTS, 'dead_bytes', 0 - string.match(letter, '^%d+:(%d+)'))
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return 1
