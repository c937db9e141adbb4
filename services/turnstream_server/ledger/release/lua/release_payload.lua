#!lua flags=allow-oom
-- Deletes the payload of a finished trajectory, and leaves a tombstone that refuses late writers.
-- No fence: a finished trajectory stays finished.
--
-- Arguments: ARGV[1] ms for which the tombstone stays    ARGV[2] its text: "over", "deleted" with its
--            run, or "abandoned": it tells a writer whose seal was lost that its trajectory is lost
-- Reply:     1, or 0 where the tombstone was there before

local TURNS, META = unpack(KEYS)

if redis.call('HEXISTS', META, 'released') == 1 then
  return 0
end
redis.call('UNLINK', TURNS, META)
redis.call('HSET', META, 'released', ARGV[2])
redis.call('PEXPIRE', META, ARGV[1])
return 1
