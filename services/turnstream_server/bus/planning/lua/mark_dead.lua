#!lua flags=allow-oom
-- Marks a sealed trajectory as dead, notifies the planner, and keeps the payload as a dead letter.
--
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] trajectory id    ARGV[3] reason    ARGV[4] the record
-- Reply:     1, or 0 where it was dead before
-- Errors:    CONFLICT  the trajectory is not sealed, or already in a batch

local LEADER, LEDGER, COUNTS, EVENTS, LETTERS, DEADLINES, HELD = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua
-- include: set_dead.lua

local entry = redis.call('HGET', LEDGER, ARGV[2])
local state = string.match(entry or '', '^[^:]*')
if state == 'dead' then
  return 0
end
if state ~= 'sealed' and state ~= 'awaiting_reward' then
  return redis.error_reply('CONFLICT ' .. ARGV[2] .. ' is ' .. (entry or 'unknown')
    .. ', not sealed')
end
local COUNTERS = {{COUNTS}}
-- include: turnstream_server.bus.leadership/whole_counters.lua

set_dead(ARGV[2], state, ARGV[3], ARGV[4])
return 1
