#!lua flags=allow-oom
-- Releases the bytes of trajectories whose payload is deleted, and wakes callers that wait for
-- them. The trajectories must be in the ledger. No fence: repeats change nothing.
--
-- Arguments: ARGV[1...] trajectory ids
-- Reply:     number of bytes that this call released

local LEDGER, HELD, BUDGET, WAKE = unpack(KEYS)

-- include: turnstream.store.run/slices.lua
-- include: turnstream.store.run/whole_numbers.lua

local num = {reserved = 0, stored = 0, planned = 0}
local total = 0
local entries = read_sliced('HMGET', LEDGER, ARGV)
for i, held in ipairs(read_sliced('HMGET', HELD, ARGV)) do
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

local damage = damaged(BUDGET)
if damage then
  return damage
end
write_sliced('HDEL', HELD, ARGV)
for part, bytes in pairs(num) do
  if bytes > 0 then
    redis.call('HINCRBY', BUDGET, part, string.format('%.0f', -bytes))
  end
end
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return total
