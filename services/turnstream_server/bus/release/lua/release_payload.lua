#!lua flags=allow-oom
-- Removes the payload of a trajectory that is over, and leaves a tombstone, which refuses whoever
-- still writes to it.
--
-- There is no fence here, in the slot of the trajectory: what the ledger gave up stays given up, so
-- that a planner which has lost the run since does no harm.
--
-- Keys, in the trajectory's slot:
--   KEYS[1] turns  stream  removed, off the server's main thread
--   KEYS[2] meta   hash    replaced by the tombstone: released
-- Arguments: ARGV[1] ms for which the tombstone stays
--            ARGV[2] what it says: "over", "deleted" with its run, or "given up" where the ledger has the trajectory as
--                    abandoned. A writer whose seal the store forgot is told by this, and by no more,
--                    that what it sends again came to nothing
-- Reply:     1, or 0 where the tombstone was there before

if redis.call('HEXISTS', KEYS[2], 'released') == 1 then
  return 0
end
redis.call('UNLINK', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[2], 'released', ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return 1
