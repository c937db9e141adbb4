#!lua flags=allow-oom
-- Records why the leader of a run cannot work, for `turnstream why`.
--
-- Arguments: ARGV[1] owner    ARGV[2] "planning_trouble" or "release_trouble"
--            ARGV[3] the reason; "" once it is solved
-- Reply:     1, or 0 where another process leads

local LEADER = KEYS[1]

if redis.call('HGET', LEADER, 'owner') ~= ARGV[1] then
  return 0
end
if ARGV[3] == '' then
  redis.call('HDEL', LEADER, ARGV[2])
else
  redis.call('HSET', LEADER, ARGV[2], ARGV[3])
end
return 1
