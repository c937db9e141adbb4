#!lua flags=no-writes
-- Reads what the counts of a run's ledger follow from, as of one moment.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash  read: stepped, committed, planned
--   KEYS[2] batches   hash  read: the entries of these three steps
--   KEYS[3] counts    hash  read, whole
--   KEYS[4] conflicts hash  read: num, last
-- Reply:
--   {trajectories of all batches up to stepped; up to committed; up to the newest planned;
--    counts as a flat list of state, number; {conflicts, the last of them}}. An entry of a step that
--    is damaged is false
-- Errors:    NORUN  no such run

local steps = redis.call('HMGET', KEYS[1], 'stepped', 'committed', 'planned')
if not steps[1] then
  return redis.error_reply('NORUN no such run')
end
local reply = {}
for i = 1, 3 do
  local entry = redis.call('HGET', KEYS[2], steps[i] or '0')
  reply[i] = tonumber(string.match(entry or '0', '^%d+')) or false
end
reply[4] = redis.call('HGETALL', KEYS[3])
reply[5] = redis.call('HMGET', KEYS[4], 'num', 'last')
return reply
