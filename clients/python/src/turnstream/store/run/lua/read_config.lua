#!lua flags=no-writes
-- Reads the newest config of a run, and its revision, as they are at one moment.
-- Reply: the revision, the config as JSON

local CONFIG = KEYS[1]
local newest = redis.call('HGET', CONFIG, 'newest')
if not newest then
  return redis.error_reply('NORUN no such run')
end
return {newest, redis.call('HGET', CONFIG, newest)}
