#!lua
-- Makes a run that goes on behind a committed step of another one, all or nothing. The same again
-- changes nothing.
--
-- Keys, all in the new run's slot:
--   KEYS[1] frontier  hash    made here, as if this run had trained and released up to the step
--   KEYS[2] config    hash    made here: "1" -> the JSON, newest -> "1"
--   KEYS[3] counts    hash    made here: accepted, planned, open
--   KEYS[4] batches   hash    made here: the step -> "<trajectories planned up to it>:<manifest hash>"
--   KEYS[5] snapshot  hash    made here: position 0-0, step, record: what a planner begins with
--   KEYS[6] versions  stream  made here: "<version + 1>-0", field r = the version_announced record
--   KEYS[7] clock     hash    made here: it stands still until a planner leads, see tick_clock.lua
--   KEYS[8] incarnation  string  read: number of the run that may be created; none: 1
-- Arguments:
--   ARGV[1] "<origin>:<step>:<trajectories planned up to it>:<manifest hash>"
--   ARGV[2] config as JSON    ARGV[3] lineage    ARGV[4] groups that count as trained
--   ARGV[5] the highest version that may not be announced again, -1 for none
--   ARGV[6] the snapshot      ARGV[7] number of the new run among those of its name
--   ARGV[8...] two per version: it, its record
-- Reply:     1, or 0 where it was made before; below 0, the number of the run that may be created in
--            place of this one, negated
-- Errors:    CONFLICT  there is another run of the name

local number = tonumber(redis.call('GET', KEYS[8]) or 1)
if number ~= tonumber(ARGV[7]) then
  return -number
end
local origin = redis.call('HGET', KEYS[1], 'origin')
if origin == ARGV[1] then
  return 0
end
if redis.call('EXISTS', KEYS[1], KEYS[2]) > 0 then
  return redis.error_reply('CONFLICT the run exists, and was not forked from there')
end
local step, total, hash = string.match(ARGV[1], '^[^:]*:(%d+):(%d+):(.*)$')
redis.call('HSET', KEYS[1], 'stepped', step, 'committed', step, 'planned', step, 'released', step,
  'folded', step, 'checkpoints', step == '0' and '' or step, 'session_epoch', 0, 'session', '',
  'dp_world_size', 0, 'lineage', ARGV[3], 'live_groups', ARGV[4], 'opened_groups', ARGV[4],
  'planned_groups', ARGV[4], 'at_plans', step .. ':0:' .. ARGV[4], 'closed', 0, 'origin', ARGV[1], 'version_floor', ARGV[5])
redis.call('HSET', KEYS[2], '1', ARGV[2], 'newest', '1')
redis.call('HSET', KEYS[3], 'accepted', total, 'planned', total, 'open', 0)
if step ~= '0' then
  redis.call('HSET', KEYS[4], step, total .. ':' .. hash)
end
redis.call('HSET', KEYS[5], 'position', '0-0', 'step', step, 'record', ARGV[6])
for i = 8, #ARGV, 2 do
  redis.call('XADD', KEYS[6], string.format('%.0f-0', ARGV[i] + 1), 'r', ARGV[i + 1])
end
local time = redis.call('TIME')
local now_ms = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', KEYS[1], 'session_ms', now_ms)
redis.call('HSET', KEYS[7], 'ms', now_ms, 'at_ms', now_ms, 'most_ms', 0)
return 1
