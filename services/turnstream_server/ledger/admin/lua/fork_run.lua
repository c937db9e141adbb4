#!lua
-- Creates a run that continues after a committed step of another run. A repeat changes nothing.
--
-- Arguments:
--   ARGV[1] "<origin>:<step>:<trajectories planned up to it>:<manifest hash>"
--   ARGV[2] config as JSON    ARGV[3] lineage    ARGV[4] groups that count as trained
--   ARGV[5] the highest version that may not be announced again, -1 for none
--   ARGV[6] the snapshot      ARGV[7] number of the new run among those of its name
--   ARGV[8...] two per version: it, its record
-- Reply:     1, or 0 where it was made before; below 0 as in create_run.lua

local FRONTIER, CONFIG, COUNTS, BATCHES, SNAPSHOT, VERSIONS, CLOCK, INCARNATION = unpack(KEYS)

local number = tonumber(redis.call('GET', INCARNATION) or 1)
if number ~= tonumber(ARGV[7]) then
  return -number
end
local origin = redis.call('HGET', FRONTIER, 'origin')
if origin == ARGV[1] then
  return 0
end
if redis.call('EXISTS', FRONTIER, CONFIG) > 0 then
  return redis.error_reply('CONFLICT the run exists, and was not forked from there')
end
local step, total, hash = string.match(ARGV[1], '^[^:]*:(%d+):(%d+):(.*)$')
redis.call('HSET', FRONTIER, 'stepped', step, 'committed', step, 'planned', step, 'released', step,
  'folded', step, 'checkpoints', step == '0' and '' or step,
  'session_epoch', 0, 'session', '', 'dp_world_size', 0, 'lineage', ARGV[3],
  'live_groups', ARGV[4], 'opened_groups', ARGV[4], 'planned_groups', ARGV[4], 'at_plans', step .. ':0:' .. ARGV[4], 'closed', 0, 'origin', ARGV[1],
  'version_floor', ARGV[5])
redis.call('HSET', CONFIG, '1', ARGV[2], 'newest', '1')
redis.call('HSET', COUNTS, 'accepted', total, 'planned', total, 'open', 0)
if step ~= '0' then
  redis.call('HSET', BATCHES, step, total .. ':' .. hash)
end
redis.call('HSET', SNAPSHOT, 'position', '0-0', 'step', step, 'record', ARGV[6])
for i = 8, #ARGV, 2 do
  redis.call('XADD', VERSIONS, string.format('%.0f-0', ARGV[i] + 1), 'r', ARGV[i + 1])
end
-- include: turnstream.store.run/server_time.lua

local now_ms = now_text()
redis.call('HSET', FRONTIER, 'session_ms', now_ms)
redis.call('HSET', CLOCK, 'ms', now_ms, 'at_ms', now_ms, 'most_ms', 0)
return 1
