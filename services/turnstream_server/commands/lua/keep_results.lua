#!lua flags=allow-oom
-- Set when results may be dropped.
-- KEYS  results of all requests, by the server ms at which they may be dropped
-- ARGV  ms from now on, 1 if an earlier time stays, then request ids
-- Reply number of request ids
-- Runs also when the server is full: results that are dropped free memory.
local now = redis.call('TIME')
local due = now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[1]
for place = 3, #ARGV do
  local known = ARGV[2] == '1' and redis.call('ZSCORE', KEYS[1], ARGV[place])
  if not known or tonumber(known) > due then
    redis.call('ZADD', KEYS[1], due, ARGV[place])
  end
end
return #ARGV - 2
