#!lua flags=allow-oom
-- Abandons an open trajectory. Its sample may be tried again as another attempt. Runs also when the
-- server is full: that frees memory.
--
-- Arguments: ARGV[1] trajectory id    ARGV[2] "<lease epoch>:<writer>", or the epoch alone
--            ARGV[3] reason    ARGV[4] the record
-- Reply:     1, or 0 where it was abandoned already, or its group was decided without it
-- Errors:    CONFLICT, fact: the state; sealed, or further on

local LEDGER, COUNTS, EVENTS, LEASES = unpack(KEYS)
local entry = redis.call('HGET', LEDGER, ARGV[1])
if not entry then
  return redis.error_reply('FENCED ' .. ARGV[1] .. ' was never opened')
end
local state, rest = string.match(entry, '^([^:]*):(.*)$')
if state == 'abandoned' or state == 'surplus' then
  return 0
end
if state ~= 'open' then
  return redis.error_reply('CONFLICT [' .. state .. '] ' .. ARGV[1] .. ' is already ' .. state)
end
if string.match(rest, '^%d+') ~= ARGV[2] and rest ~= ARGV[2] then
  return redis.error_reply('FENCED ' .. ARGV[1] .. ' is open for ' .. rest .. ', not for ' .. ARGV[2])
end

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(COUNTS)
if damage then
  return damage
end
redis.call('HSET', LEDGER, ARGV[1], 'abandoned:' .. ARGV[3])
redis.call('HINCRBY', COUNTS, 'open', -1)
redis.call('HINCRBY', COUNTS, 'abandoned', 1)
redis.call('XADD', EVENTS, '*', 'r', ARGV[4])
redis.call('ZREM', LEASES, ARGV[1])
return 1
