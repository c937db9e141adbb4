#!lua flags=allow-oom
-- Takes trajectories whose payload is released out of what the run holds, and tells those who wait
-- for room.
--
-- There is no fence: whoever removed payload says so, also where it has lost the run since. A
-- trajectory is still in the ledger then, for it leaves that only after this.
--
-- Keys, all in the run's slot:
--   KEYS[1] ledger  hash    read
--   KEYS[2] held    hash    removed: the trajectory ids
--   KEYS[3] budget  hash    changed: reserved, stored, planned
--   KEYS[4] wake    stream  added, where anything was held
-- Arguments: ARGV[1...] trajectory ids
-- Reply:     the bytes that were given back now, an integer

-- include: turnstream.store.run/slices.lua

local num = {reserved = 0, stored = 0, planned = 0}
local total = 0
local entries = read_sliced('HMGET', KEYS[1], ARGV)
for i, held in ipairs(read_sliced('HMGET', KEYS[2], ARGV)) do
  if held then
    local mark, bytes = string.match(held, '^(r?)(%d+)$')
    local part = 'stored'
    if mark == 'r' then
      part = 'reserved'
    elseif string.sub(entries[i] or '', 1, 8) == 'planned:' then
      part = 'planned'
    end
    num[part] = num[part] + bytes
    total = total + bytes
  end
end
if total == 0 then
  return 0
end

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(KEYS[3])
if damage then
  return damage
end
write_sliced('HDEL', KEYS[2], ARGV)
for part, bytes in pairs(num) do
  if bytes > 0 then
    redis.call('HINCRBY', KEYS[3], part, string.format('%.0f', -bytes))
  end
end
redis.call('XADD', KEYS[4], 'MAXLEN', 1, '*', 'w', '')
return total
