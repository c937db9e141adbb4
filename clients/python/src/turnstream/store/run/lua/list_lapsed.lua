#!lua flags=allow-oom
-- Lists open trajectories whose lease has ended, the longest ended first.
--
-- A lease that ends later than one that begins now is from before the clock was set back: some of them
-- are cut here to that length. None has ended by a time that the clock has not reached again.
--
-- Arguments: ARGV[1] leases that ended at this time or before, ms of server time; "" for now
--            ARGV[2] how many at most
-- Reply:     two per trajectory: its id, its ledger entry

local LEDGER, LEASES, CONFIG = unpack(KEYS)
-- include: lease_end.lua

local now_ms, _, ends_ms = new_lease()
if not now_ms then
  return redis.error_reply('NORUN no such run')
end
local last_end = string.format('%.0f', ends_ms)
local beyond = redis.call('ZRANGEBYSCORE', LEASES, '(' .. last_end, '+inf', 'LIMIT', 0, ARGV[2])
for _, id in ipairs(beyond) do
  redis.call('ZADD', LEASES, last_end, id)
end

local until_ms = ARGV[1] ~= '' and ARGV[1] or string.format('%.0f', now_ms)
if tonumber(until_ms) > now_ms then
  return {}
end
local replies = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', until_ms, 'LIMIT', 0, ARGV[2])) do
  local entry = redis.call('HGET', LEDGER, id)
  if entry and string.sub(entry, 1, 5) == 'open:' then
    replies[#replies + 1] = id
    replies[#replies + 1] = entry
  end
end
return replies
