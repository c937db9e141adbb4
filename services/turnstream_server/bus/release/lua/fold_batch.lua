#!lua flags=allow-oom
-- Removes trajectories of a released batch from the ledger, and leaves fingerprints of its groups.
--
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] step    ARGV[3] number of group names
--   ARGV[4...] that many group names, then trajectory ids
-- Reply:     number of removed trajectories
-- Errors:    CONFLICT  the step is not released

local LEADER, FRONTIER, LEDGER, GROUPS, OVER, REWARDS = unpack(KEYS)

-- include: turnstream.store.run/slices.lua
-- include: turnstream.store.run/finished_names.lua
-- include: turnstream_server.bus.leadership/fenced.lua

local released = tonumber(redis.call('HGET', FRONTIER, 'released') or 0)
if tonumber(ARGV[2]) > released then
  return redis.error_reply('CONFLICT step ' .. ARGV[2] .. ' is not released; step ' .. released
    .. ' is')
end

local function arguments(first, last)
  local some = {}
  for i = first, last do
    some[#some + 1] = ARGV[i]
  end
  return some
end

local last_group = 3 + ARGV[3]
if last_group > 3 then
  local names = arguments(4, last_group)
  local gone = {}
  for i, entry in ipairs(read_sliced('HMGET', GROUPS, names)) do
    if entry and string.match(entry, ':(.*)$') == 'planned' then
      gone[#gone + 1] = names[i]
    end
  end
  if #gone > 0 then
    write_sliced('HDEL', GROUPS, gone)
    add_finished(gone)
  end
end
local ids = arguments(last_group + 1, #ARGV)
if #ids == 0 then
  return 0
end
local ours = {}
local planned = 'planned:' .. ARGV[2]
for i, entry in ipairs(read_sliced('HMGET', LEDGER, ids)) do
  if entry == planned then
    ours[#ours + 1] = ids[i]
  end
end
if #ours == 0 then
  return 0
end
write_sliced('HDEL', REWARDS, ours)
return write_sliced('HDEL', LEDGER, ours)
