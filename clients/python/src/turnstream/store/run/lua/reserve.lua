#!lua flags=allow-oom
-- Tops up the bytes of open trajectories that have outgrown their reservation. None is refused: open
-- trajectories must finish before their bytes are released. Runs also when the server is full.
--
-- Keys, all in the run's slot:
--   KEYS[1] ledger  hash  read
--   KEYS[2] held    hash  trajectory id -> "r<bytes>"; changed
--   KEYS[3] budget  hash  changed: reserved
-- Arguments: ARGV[1...] three per trajectory: its id; "<lease epoch>:<writer>"; bytes of its records
-- Reply:     per trajectory, in order: bytes of records for which there is room now; 0 where it is
--            not open with this lease
-- Errors:    INVALID  bytes that are no number: nothing was written

local OVERHEAD = 4096  -- of keys, ledger entry, lease and events of a trajectory

for i = 1, #ARGV, 3 do
  if not tonumber(ARGV[i + 2]) then
    return redis.error_reply('INVALID bytes of ' .. ARGV[i] .. ' are no number')
  end
end

-- include: whole_numbers.lua

local damage = damaged(KEYS[3])
if damage then
  return damage
end
local replies = {}
local grown = 0
for i = 1, #ARGV, 3 do
  local id = ARGV[i]
  local bytes = 0
  if redis.call('HGET', KEYS[1], id) == 'open:' .. ARGV[i + 1] then
    local before = tonumber(string.match(redis.call('HGET', KEYS[2], id) or 'r0', '^r(%d+)$'))
    bytes = math.max(before, ARGV[i + 2] + OVERHEAD)
    if bytes > before then
      redis.call('HSET', KEYS[2], id, string.format('r%.0f', bytes))
      grown = grown + bytes - before
    end
    bytes = math.max(0, bytes - OVERHEAD)
  end
  replies[#replies + 1] = bytes
end
if grown > 0 then
  redis.call('HINCRBY', KEYS[3], 'reserved', string.format('%.0f', grown))
end
return replies
