#!lua flags=allow-oom
-- Removes the payload of a trajectory that is over, and leaves a tombstone, which refuses whoever
-- still writes to it.
--
-- There is no fence here, in the slot of the trajectory: what the ledger gave up stays given up, so
-- that a planner which has lost the run since does no harm.
--
-- Keys, in the trajectory's slot:
--   KEYS[1] turns  stream  removed, off the server's main thread
--   KEYS[2] meta   hash    replaced by the tombstone: released, 1, or "given up" where a planner had
--                          ended it before anybody sealed it; read: writer, sealed
-- Arguments: ARGV[1] ms for which the tombstone stays
-- Reply:     1, or 0 where the tombstone was there before

if redis.call('HEXISTS', KEYS[2], 'released') == 1 then
  return 0
end
local writer, sealed = unpack(redis.call('HMGET', KEYS[2], 'writer', 'sealed'))
local is_given_up = writer == 'given up' and sealed ~= '1'
redis.call('UNLINK', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[2], 'released', is_given_up and writer or 1)
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return 1
