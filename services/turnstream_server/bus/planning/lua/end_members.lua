#!lua
-- Part of settle_eval, settle_group, settle_members and write_manifest: ends
-- trajectories, and counts them by state.
--
-- Defines state_of(id); settle(id, from, into, reason); num_ended; and count_ended(), the last write.
-- settle_rest(group, num_samples, becomes, reason) settles every attempt of a group whose state is a
-- field of `becomes`, and returns the bytes that were reserved for samples without a trajectory.
-- LEDGER, COUNTS, DEADLINES, LEASES, MEMBERS, REFILLS, HELD and BUDGET are the keys.

local num, num_ended = {}, 0

local function state_of(id)
  return string.match(redis.call('HGET', LEDGER, id) or '', '^[^:]*')
end

local function settle(id, from, into, reason)
  redis.call('HSET', LEDGER, id, into .. ':' .. reason)
  redis.call('ZREM', DEADLINES, 'reward:' .. id)
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

local function settle_rest(group, num_samples, becomes, reason)
  local attempts = string.match(redis.call('HGET', MEMBERS, group) or '', '^%d*:(%d+)') or 0
  local released = 0
  for sample = 0, num_samples - 1 do
    for attempt = 0, tonumber(attempts) do
      local id = group .. '/' .. sample .. '/' .. attempt
      local from = state_of(id)
      local reserved = from == '' and string.match(redis.call('HGET', HELD, id) or '', '^r(%d+)$')
      if becomes[from] then
        settle(id, from, becomes[from], reason)
        redis.call('ZREM', LEASES, id)
      elseif reserved then
        redis.call('HDEL', HELD, id)
        redis.call('HINCRBY', BUDGET, 'reserved', '-' .. reserved)
        released = released + reserved
      end
      redis.call('ZREM', REFILLS, id)
    end
  end
  return released
end
