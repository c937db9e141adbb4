#!lua flags=allow-oom
-- Notes that an observer lives, and what it has seen. An expired one is forgotten.
--
-- Keys, in the run's slot:
--   KEYS[1] observers  hash  name -> "<newest step seen>:<expires_ms>:<expiry in ms>", changed
-- Arguments: ARGV[1] name    ARGV[2] newest step seen; a lower one than before changes nothing
-- Reply:     its expiry in ms
-- Errors:    EXPIRED  it was silent for longer than its expiry, or was never declared

local seen, expires_ms, expiry_ms = string.match(
  redis.call('HGET', KEYS[1], ARGV[1]) or '', '^(%d+):(%d+):(%d+)$')
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
if not seen or tonumber(expires_ms) <= now_ms then
  redis.call('HDEL', KEYS[1], ARGV[1])
  return redis.error_reply('EXPIRED observer ' .. ARGV[1] .. ' was '
    .. (seen and 'silent for more than ' .. expiry_ms / 1000 .. ' s' or 'never declared')
    .. '; nothing is kept for it')
end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f:%.0f:%s',
  math.max(tonumber(seen), tonumber(ARGV[2])), now_ms + expiry_ms, expiry_ms))
return tonumber(expiry_ms)
