#!lua flags=allow-oom
-- Run one command, also when the server is full.
-- KEYS  its key
-- ARGV  its name, and its words after the key
-- Reply that of the command
return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))
