#!lua flags=allow-oom
-- Tops up the bytes of open trajectories that have outgrown their reservation. None is refused: open
-- trajectories must finish before their bytes are released. Runs also when the server is full.
--
-- Arguments: ARGV[1...] three per trajectory: its id; "<lease epoch>:<writer>"; bytes of its records
-- Reply:     per trajectory: bytes of records for which there is room now; 0 where it is not open
--            with this lease

local LEDGER, HELD, BUDGET = unpack(KEYS)
local OVERHEAD = 4096  -- of keys, ledger entry, lease and events of a trajectory

for i = 1, #ARGV, 3 do
  if not tonumber(ARGV[i + 2]) then
    return redis.error_reply('INVALID bytes of ' .. ARGV[i] .. ' are no number')
  end
end

-- include: whole_numbers.lua

local damage = damaged(BUDGET)
if damage then
  return damage
end
local replies = {}
local grown = 0
for i = 1, #ARGV, 3 do
  local id = ARGV[i]
  local bytes = 0
  if redis.call('HGET', LEDGER, id) == 'open:' .. ARGV[i + 1] then
    local before = tonumber(string.match(redis.call('HGET', HELD, id) or 'r0', '^r(%d+)$'))
    bytes = math.max(before, ARGV[i + 2] + OVERHEAD)
    if bytes > before then
      redis.call('HSET', HELD, id, string.format('r%.0f', bytes))
      grown = grown + bytes - before
    end
    bytes = math.max(0, bytes - OVERHEAD)
  end
  replies[#replies + 1] = bytes
end
if grown > 0 then
  redis.call('HINCRBY', BUDGET, 'reserved', string.format('%.0f', grown))
end
return replies
