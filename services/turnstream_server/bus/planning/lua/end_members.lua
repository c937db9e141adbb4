#!lua
-- Part of settle_eval, settle_group and settle_members: ends trajectories, and counts them by state.
--
-- Defines settle_all(ids, becomes, reason), which ends those whose state is a field of `becomes`, and
-- returns {id, state} of the others; num_ended; and count_ended(), the last write.
-- settle_rest(group, num_samples, becomes, reason) settles every attempt of a group, and returns the
-- bytes that were reserved for samples without a trajectory.
-- LEDGER, COUNTS, DEADLINES, LEASES, MEMBERS, REFILLS, HELD and BUDGET are the keys.

-- include: turnstream.store.run/slices.lua
-- include: group_attempts.lua

local num, num_ended = {}, 0

local function settle_entries(ids, entries, becomes, reason)
  local changes, leases, deadlines, unknown = {}, {}, {}, {}
  for i, id in ipairs(ids) do
    local from = string.match(entries[i] or '', '^[^:]*')
    local into = becomes[from]
    if into then
      changes[#changes + 1] = id
      changes[#changes + 1] = into .. ':' .. reason
      num[from] = (num[from] or 0) - 1
      num[into] = (num[into] or 0) + 1
      if from == 'open' then
        leases[#leases + 1] = id
      elseif from == 'awaiting_reward' then
        deadlines[#deadlines + 1] = 'reward:' .. id
      end
    elseif from == '' then
      unknown[#unknown + 1] = id
    end
  end
  num_ended = num_ended + #changes / 2
  write_sliced('HSET', LEDGER, changes)
  if #leases > 0 then  -- settle_members has no such key
    write_sliced('ZREM', LEASES, leases)
  end
  write_sliced('ZREM', DEADLINES, deadlines)
  return unknown
end

local function settle_all(ids, becomes, reason)
  settle_entries(ids, read_sliced('HMGET', LEDGER, ids), becomes, reason)
end

local function count_ended()
  for state, number in pairs(num) do
    if number ~= 0 then
      redis.call('HINCRBY', COUNTS, state, number)
    end
  end
end

-- Return the bytes that were reserved for these trajectories, which were never opened.
local function release_reserved(ids)
  local released, gone = 0, {}
  for i, held in ipairs(read_sliced('HMGET', HELD, ids)) do
    local bytes = string.match(held or '', '^r(%d+)$')
    if bytes then
      gone[#gone + 1] = ids[i]
      released = released + bytes
    end
  end
  write_sliced('HDEL', HELD, gone)
  if released > 0 then
    redis.call('HINCRBY', BUDGET, 'reserved', string.format('%.0f', -released))
  end
  return released
end

local function settle_rest(group, num_samples, becomes, reason)
  local released = 0
  local has_refills = redis.call('ZCARD', REFILLS) > 0
  each_attempt(group, num_samples, function(ids, entries)
    released = released + release_reserved(settle_entries(ids, entries, becomes, reason))
    if has_refills then
      write_sliced('ZREM', REFILLS, ids)
    end
  end)
  return released
end
