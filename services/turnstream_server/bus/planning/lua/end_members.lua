#!lua
-- Part of settle_eval and settle_group: ends trajectories of a group, and counts them by state.
--
-- Defines state_of(id); settle(id, from, into, reason); num_ended; and count_ended(), the last write.
-- LEDGER, COUNTS, DEADLINES and LEASES are the keys.

local num, num_ended = {}, 0

local function state_of(id)
  return string.match(redis.call('HGET', LEDGER, id) or '', '^[^:]*')
end

local function settle(id, from, into, reason)
  redis.call('HSET', LEDGER, id, into .. ':' .. reason)
  redis.call('ZREM', DEADLINES, 'reward:' .. id)
  redis.call('ZREM', LEASES, id)
  num[from] = (num[from] or 0) - 1
  num[into] = (num[into] or 0) + 1
  num_ended = num_ended + 1
end

local function count_ended()
  for state, number in pairs(num) do
    if number ~= 0 then
      redis.call('HINCRBY', COUNTS, state, number)
    end
  end
end
