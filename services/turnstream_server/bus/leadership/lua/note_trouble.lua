#!lua flags=allow-oom
-- Leaves word of what keeps the leader of a run from going on, for whoever asks why nothing comes.
--
-- Keys, in the run's slot:
--   KEYS[1] leader  hash  changed: planning_trouble or release_trouble
-- Arguments: ARGV[1] owner    ARGV[2] "planning_trouble" or "release_trouble"
--            ARGV[3] what it is, for people; "" where it is over
-- Reply:     1, or 0 where another one leads

if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then
  return 0
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[2])
else
  redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
end
return 1
