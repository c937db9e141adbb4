#!lua flags=allow-oom
-- Registers the address of a batcher under a lease, or ends it, and removes addresses whose lease ended.
--
-- Keys:
--   KEYS[1] batchers  zset  address -> end of its lease, server ms; changed
-- Arguments: ARGV[1] address, "host:port"    ARGV[2] length of the lease, ms; 0 ends it
-- Reply:     1

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], string.format('%.0f', now_ms + ARGV[2]), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now_ms))
return 1
