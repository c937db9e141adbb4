#!lua flags=allow-oom
-- Delete the record of an expired checkpoint, unless it was replaced.
-- KEYS  checkpoints
-- ARGV  path, the expired record
-- Reply 1 if there is no record now, else 0
local stored = redis.call('HGET', KEYS[1], ARGV[1])
if stored and stored ~= ARGV[2] then
  return 0
end
redis.call('HDEL', KEYS[1], ARGV[1])
return 1
