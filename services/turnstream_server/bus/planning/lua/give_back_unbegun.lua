#!lua flags=allow-oom
-- Part of settle_eval, settle_group and write_manifest: what was reserved for samples that are never
-- begun.
--
-- Needs HELD    a key, hash  removed: the trajectory ids
--       BUDGET  a key, hash  changed: reserved
-- Gives give_back(id), of a trajectory that the ledger does not have, and given_back, the bytes so far.

local given_back = 0

local function give_back(id)
  local bytes = string.match(redis.call('HGET', HELD, id) or '', '^r(%d+)$')
  if bytes then
    redis.call('HDEL', HELD, id)
    redis.call('HINCRBY', BUDGET, 'reserved', '-' .. bytes)
    given_back = given_back + bytes
  end
end
