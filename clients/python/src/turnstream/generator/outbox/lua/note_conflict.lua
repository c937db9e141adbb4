#!lua flags=allow-oom
-- Counts a write that was refused because its key has another content: the script that refuses it
-- may stand in the slot of a trajectory, and cannot count for the run.
-- Arguments: ARGV[1] trajectory id    ARGV[2] why it was refused

local CONFLICTS = KEYS[1]
-- include: turnstream.store.run/server_time.lua

redis.call('HINCRBY', CONFLICTS, 'num', 1)
redis.call('HSET', CONFLICTS, 'last', ARGV[1] .. ': ' .. ARGV[2], 'last_ms', now_text())
return 1
