#!lua flags=no-writes
-- Reads how far the samples of a group are, for a generator that opens a group again.
--
-- Arguments: ARGV[1] group name    ARGV[2] num_samples
-- Reply: {state of the group: "new" if it was never opened, "over" if it is finished and released;
--         then, of a group that is open, the state of the first attempt of each sample, empty if it
--         was never opened. An open sample that was tried again has
--         "open:<number of its last attempt>:<state of that attempt>"}

local FRONTIER, GROUPS, LEDGER, OVER = unpack(KEYS)
-- include: finished_names.lua

-- include: slices.lua

if redis.call('EXISTS', FRONTIER) == 0 then
  return redis.error_reply('NORUN no such run')
end
local group = redis.call('HGET', GROUPS, ARGV[1])
if not group then
  return {is_finished_name(ARGV[1]) and 'over' or 'new'}
end
local samples, state = string.match(group, '^(%d+):(.*)$')
if samples ~= ARGV[2] then
  return redis.error_reply('CONFLICT group ' .. ARGV[1] .. ' was opened with ' .. samples
    .. ' samples, not ' .. ARGV[2])
end
local reply = {state}
if state ~= 'open' and state ~= 'evaluating' then
  return reply
end
local ids = {}
for sample = 0, samples - 1 do
  ids[#ids + 1] = ARGV[1] .. '/' .. sample .. '/0'
end

local function last_attempt(sample)
  local last, state = 0, nil
  while true do
    local entry = redis.call('HGET', LEDGER, ARGV[1] .. '/' .. sample .. '/' .. last + 1)
    if not entry then
      return last > 0 and ':' .. last .. ':' .. state or ''
    end
    last, state = last + 1, string.match(entry, '^[^:]*')
  end
end

for i, entry in ipairs(read_sliced('HMGET', LEDGER, ids)) do
  local state = entry and string.match(entry, '^[^:]*') or ''
  reply[#reply + 1] = state == 'open' and state .. last_attempt(i - 1) or state
end
return reply
