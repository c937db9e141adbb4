#!lua flags=allow-oom
-- Part of settle_eval, settle_group and write_manifest: releases the bytes that were reserved for
-- samples without a trajectory.
--
-- Defines give_back(id), and given_back, the sum of the bytes. HELD and BUDGET are the keys.

local given_back = 0

local function give_back(id)
  local bytes = string.match(redis.call('HGET', HELD, id) or '', '^r(%d+)$')
  if bytes then
    redis.call('HDEL', HELD, id)
    redis.call('HINCRBY', BUDGET, 'reserved', '-' .. bytes)
    given_back = given_back + bytes
  end
end
