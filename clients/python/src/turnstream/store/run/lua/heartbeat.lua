#!lua flags=allow-oom
-- Renews the leases of a writer's open trajectories, also ended ones, and reports which of them it
-- has lost. Runs also when the server is full: a writer loses no trajectory for want of memory.
--
-- Arguments: ARGV[1...] two per trajectory: its id; "<lease epoch>:<writer>", since a store that lost
--            a take-over may have given its epoch to another writer
-- Reply: {lease in ms; then per trajectory: "OK", or "FENCED [<state>] <why>"; the state is unknown if
--         the ledger does not have it, and missing if another writer has it}

local LEDGER, LEASES, CONFIG = unpack(KEYS)
-- include: lease_end.lua

local now_ms, lease_ms, last_ms = new_lease()
if not now_ms then
  return redis.error_reply('NORUN no such run')
end
local ends_ms = string.format('%.0f', last_ms)

local replies = {lease_ms}
for i = 1, #ARGV, 2 do
  local id = ARGV[i]
  local entry = redis.call('HGET', LEDGER, id)
  local state, rest = string.match(entry or '', '^([^:]*):(.*)$')
  if not state then
    replies[#replies + 1] = 'FENCED [unknown] ' .. id .. ' was never opened, or is released'
  elseif state ~= 'open' then
    replies[#replies + 1] = 'FENCED [' .. state .. '] ' .. id .. ' is ' .. state .. ': ' .. rest
  elseif rest == ARGV[i + 1] then
    redis.call('ZADD', LEASES, ends_ms, id)
    replies[#replies + 1] = 'OK'
  else
    local epoch, writer = string.match(rest, '^(%d+):(.*)$')
    replies[#replies + 1] = 'FENCED ' .. id .. ' was adopted by ' .. writer .. ' with epoch ' .. epoch
  end
end
return replies
