#!lua flags=allow-oom
-- Ends a run for everybody who knows it, in one moment: of its keys stay the ledger, by another
-- name, which leads to the payload, and a tombstone. In the same moment its name becomes free for
-- the next run, whose keys are other ones. The same again changes nothing.
--
-- From here on nothing of the run is ever added: every script finds neither frontier nor config
-- (NORUN), neither leader nor ledger entry (FENCED). An opening append, which alone makes the place of a payload, is sent only by
-- whoever has an entry in the ledger: its place gets a tombstone too, before the entry goes.
--
-- Runs also when the server is full: it makes room.
--
-- Keys, all in the run's slot:
--   KEYS[1] deleted   hash    made here: since_ms, fence_ms; read: its time to live
--   KEYS[2] wake      stream  added, to wake waiting callers; expires
--   KEYS[3] ledger    hash    becomes `doomed`
--   KEYS[4] doomed    hash    made here, where the run has trajectories
--   KEYS[5] frontier  hash    removed
--   KEYS[6] config    hash    read: lease_s of all revisions; removed
--   KEYS[7] incarnation  string  moved on behind this run
--   KEYS[8...]        all other keys of the run, removed off the server's main thread
-- Arguments: ARGV[1] shortest fence in ms    ARGV[2] leases that it is long at least
--            ARGV[3] number of this run among those of its name
-- Reply:     ms for which late writers are fenced; 0 where the deletion was done before
-- Errors:    NORUN  no such run

local fence_ms = redis.call('HGET', KEYS[1], 'fence_ms')
if not fence_ms and redis.call('EXISTS', KEYS[5], KEYS[6]) == 0 then
  return redis.error_reply('NORUN no such run')
end
local number = tonumber(ARGV[3])
if tonumber(redis.call('GET', KEYS[7]) or 1) <= number then
  redis.call('SET', KEYS[7], number + 1)
end
if fence_ms then
  return redis.call('PTTL', KEYS[1]) == -1 and tonumber(fence_ms) or 0
end
fence_ms = tonumber(ARGV[1])
local config = redis.call('HGETALL', KEYS[6])
for i = 1, #config, 2 do
  if string.match(config[i], '^%d+$') then
    local lease_s = cjson.decode(config[i + 1]).lease_s or 60
    fence_ms = math.max(fence_ms, math.floor(ARGV[2] * lease_s * 1000))
  end
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'fence_ms', string.format('%.0f', fence_ms),
  'since_ms', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
if redis.call('EXISTS', KEYS[3]) == 1 then
  redis.call('RENAME', KEYS[3], KEYS[4])
end
redis.call('UNLINK', KEYS[5], KEYS[6], unpack(KEYS, 8))
redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'w', '')
redis.call('PEXPIRE', KEYS[2], string.format('%.0f', fence_ms))
return fence_ms
