#!lua flags=allow-oom
-- Deletes a run at once, but for its payload. The ledger, which leads to the payload, is renamed,
-- and a tombstone remains. A repeat changes nothing. From here on no script writes to the run: it
-- finds neither frontier nor config (NORUN), and neither leader nor ledger entry (FENCED). Runs also
-- when the server is full.
--
-- Keys: as below, then all other keys of the run, which are removed
-- Arguments: ARGV[1] shortest fence in ms    ARGV[2] leases that it is long at least
--            ARGV[3] number of this run among those of its name
-- Reply:     ms for which late writers are fenced; 0 where the deletion was done before

local MOST_REVISIONS = 256  -- the newest in force; no writer has a lease of an earlier one
local DELETED, WAKE, LEDGER, DOOMED, FRONTIER, CONFIG, INCARNATION = unpack(KEYS)
local fence_ms = redis.call('HGET', DELETED, 'fence_ms')
if not fence_ms and redis.call('EXISTS', FRONTIER, CONFIG) == 0 then
  return redis.error_reply('NORUN no such run')
end
local number = tonumber(ARGV[3])
if tonumber(redis.call('GET', INCARNATION) or 1) <= number then
  redis.call('SET', INCARNATION, number + 1)
end
if fence_ms then
  return redis.call('PTTL', DELETED) == -1 and tonumber(fence_ms) or 0
end
fence_ms = tonumber(ARGV[1])
local newest = tonumber(redis.call('HGET', CONFIG, 'newest') or 0)
for revision = math.max(1, newest - MOST_REVISIONS + 1), newest do
  local stored = redis.call('HGET', CONFIG, string.format('%.0f', revision))
  local lease_s = stored and cjson.decode(stored).lease_s or 60
  fence_ms = math.max(fence_ms, math.floor(ARGV[2] * lease_s * 1000))
end
-- include: turnstream.store.run/server_time.lua

redis.call('HSET', DELETED, 'fence_ms', string.format('%.0f', fence_ms),
  'since_ms', now_text())
if redis.call('EXISTS', LEDGER) == 1 then
  redis.call('RENAME', LEDGER, DOOMED)
end
redis.call('UNLINK', FRONTIER, CONFIG, unpack(KEYS, 8))
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
redis.call('PEXPIRE', WAKE, string.format('%.0f', fence_ms))
return fence_ms
