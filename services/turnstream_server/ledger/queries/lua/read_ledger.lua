#!lua flags=no-writes
-- Reads the counts of a run's ledger at one time.
-- Reply: {trajectories of all batches up to stepped; up to committed; up to the newest planned, each
--         false where its entry is damaged; counts as a flat list; {conflicts, the last of them}}

local FRONTIER, BATCHES, COUNTS, CONFLICTS = unpack(KEYS)
local steps = redis.call('HMGET', FRONTIER, 'stepped', 'committed', 'planned')
if not steps[1] then
  return redis.error_reply('NORUN no such run')
end
local reply = {}
for i = 1, 3 do
  local entry = redis.call('HGET', BATCHES, steps[i] or '0')
  reply[i] = tonumber(string.match(entry or '0', '^%d+')) or false
end
reply[4] = redis.call('HGETALL', COUNTS)
reply[5] = redis.call('HMGET', CONFLICTS, 'num', 'last')
return reply
