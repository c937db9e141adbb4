#!lua flags=no-writes
-- Reads the newest config of a run, and its revision, as they are at one moment.
--
-- Keys:
--   KEYS[1] config  hash  read: newest, and that revision's JSON
-- Reply:     the revision, the config as JSON
-- Errors:    NORUN  no such run

local newest = redis.call('HGET', KEYS[1], 'newest')
if not newest then
  return redis.error_reply('NORUN no such run')
end
return {newest, redis.call('HGET', KEYS[1], newest)}
