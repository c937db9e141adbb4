#!lua
-- Makes another writer the owner of an open trajectory whose lease has ended, with the next lease
-- epoch: see append.lua. The owner itself gets its trajectory with the epoch that it has.
--
-- Arguments: ARGV[1] trajectory id    ARGV[2] the new writer
-- Reply:     {its lease epoch; num_samples of its group}
-- Errors:
--   HELD      fact: ms left of the lease of its writer
--   CONFLICT  fact: unknown, where it was never opened; its state, where it is no longer open;
--             group, where its group is decided or finished

local LEDGER, LEASES, CONFIG, GROUPS = unpack(KEYS)
-- include: lease_end.lua

local now_ms, _, ends_ms = new_lease()
if not now_ms then
  return redis.error_reply('NORUN no such run')
end
local id = ARGV[1]
local entry = redis.call('HGET', LEDGER, id)
if not entry then
  return redis.error_reply('CONFLICT [unknown] ' .. id .. ' was never opened, or is finished')
end
local epoch, writer = string.match(entry, '^open:(%d+):(.*)$')
if not epoch then
  local ended = string.match(entry, '^[^:]*')
  return redis.error_reply('CONFLICT [' .. ended .. '] ' .. id .. ' is already ' .. ended)
end
local group = string.match(id, '^[^/]*')
local num_samples, state = string.match(redis.call('HGET', GROUPS, group) or '', '^(%d+):(.*)$')
if state ~= 'open' and state ~= 'evaluating' then
  return redis.error_reply('CONFLICT [group] group ' .. group .. ' is already ' .. (state or 'over'))
end

if writer ~= ARGV[2] then
  local left_ms = (redis.call('ZSCORE', LEASES, id) or 0) - now_ms
  if left_ms > ends_ms - now_ms then
    -- The clock was set back. Without this, a dead writer would hold it until the clock caught up.
    left_ms = ends_ms - now_ms
    redis.call('ZADD', LEASES, string.format('%.0f', ends_ms), id)
  end
  if left_ms > 0 then
    return redis.error_reply('HELD [' .. string.format('%.0f', left_ms) .. '] ' .. id
      .. ' is being written by ' .. writer)
  end
  epoch = epoch + 1
  redis.call('HSET', LEDGER, id, 'open:' .. epoch .. ':' .. ARGV[2])
end
redis.call('ZADD', LEASES, string.format('%.0f', ends_ms), id)
return {tonumber(epoch), tonumber(num_samples)}
