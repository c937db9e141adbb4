#!lua flags=allow-oom
-- Registers the address of a batcher under a lease, or ends it, and removes addresses whose lease ended.
-- Arguments: ARGV[1] address, "host:port"    ARGV[2] length of the lease, ms; 0 ends it

local BATCHERS = KEYS[1]

-- include: server_time.lua

local now_ms = server_ms()
redis.call('ZADD', BATCHERS, string.format('%.0f', now_ms + ARGV[2]), ARGV[1])
redis.call('ZREMRANGEBYSCORE', BATCHERS, '-inf', string.format('%.0f', now_ms))
return 1
