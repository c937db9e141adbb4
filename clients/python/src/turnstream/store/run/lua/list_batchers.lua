#!lua flags=no-writes
-- Lists the addresses of batchers whose lease has not ended.
--
-- Keys:
--   KEYS[1] batchers  zset  read: address -> end of its lease, server ms
-- Reply:     the addresses, the one that was heard last first

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
return redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', string.format('(%.0f', now_ms))
