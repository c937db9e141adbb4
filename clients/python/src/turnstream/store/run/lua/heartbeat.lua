#!lua flags=allow-oom
-- Renews the leases of a writer's open trajectories, and reports which of them it has lost.
--
-- A lease that has ended is renewed too, as long as the trajectory is open with the writer's epoch: no
-- other writer has adopted it.
--
-- Runs also when the server is full: a writer loses no trajectory for want of memory.
--
-- Keys, all in the run's slot:
--   KEYS[1] ledger  hash  read
--   KEYS[2] leases  zset  trajectory id -> end of its lease; changed
--   KEYS[3] config  hash  read: newest, that revision's JSON, lease_floor
-- Arguments: ARGV[1...] two per trajectory: its id; "<lease epoch>:<writer>", since a store that lost
--            a take-over may have given its epoch to another writer
-- Reply: {lease in ms; then per trajectory, in order: "OK", or "FENCED [<state>] <why>"; the state is
--         unknown if the ledger does not have it, and missing if another writer has it}
-- Errors:    NORUN  no such run

local CONFIG = KEYS[3]
-- include: lease_end.lua

local now_ms, lease_ms, last_ms = new_lease()
if not now_ms then
  return redis.error_reply('NORUN no such run')
end
local ends_ms = string.format('%.0f', last_ms)

local replies = {lease_ms}
for i = 1, #ARGV, 2 do
  local id = ARGV[i]
  local entry = redis.call('HGET', KEYS[1], id)
  local state, rest = string.match(entry or '', '^([^:]*):(.*)$')
  if not state then
    replies[#replies + 1] = 'FENCED [unknown] ' .. id .. ' was never opened, or is released'
  elseif state ~= 'open' then
    replies[#replies + 1] = 'FENCED [' .. state .. '] ' .. id .. ' is ' .. state .. ': ' .. rest
  elseif rest == ARGV[i + 1] then
    redis.call('ZADD', KEYS[2], ends_ms, id)
    replies[#replies + 1] = 'OK'
  else
    local epoch, writer = string.match(rest, '^(%d+):(.*)$')
    replies[#replies + 1] = 'FENCED ' .. id .. ' was adopted by ' .. writer
      .. ' with epoch ' .. epoch
  end
end
return replies
