#!lua flags=allow-oom
-- Takes trajectories of a released batch out of the ledger, and leaves fingerprints of its groups.
-- Until `finish_batch` the plan names them, from then on a compact record.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash  read: epoch
--   KEYS[2] frontier  hash  read: released
--   KEYS[3] ledger    hash  removed: trajectory ids that are "planned:<step>"
--   KEYS[4] groups    hash  removed: names of groups that are planned
--   KEYS[5] over      hash  added: their fingerprints
--   KEYS[6] rewards   hash  removed: the trajectory ids
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] step    ARGV[3] number of group names
--   ARGV[4...] that many group names, then trajectory ids
-- Reply: how many trajectories were taken out now, an integer
-- Errors:
--   FENCED    another planner leads
--   CONFLICT  the step is not released

local OVER = KEYS[5]

-- include: turnstream.store.run/slices.lua

-- include: turnstream.store.run/finished_names.lua

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local released = tonumber(redis.call('HGET', KEYS[2], 'released') or 0)
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
  for i, entry in ipairs(read_sliced('HMGET', KEYS[4], names)) do
    if entry and string.match(entry, ':(.*)$') == 'planned' then
      gone[#gone + 1] = names[i]
    end
  end
  if #gone > 0 then
    write_sliced('HDEL', KEYS[4], gone)
    add_finished(gone)
  end
end
local ids = arguments(last_group + 1, #ARGV)
if #ids == 0 then
  return 0
end
local ours = {}
local planned = 'planned:' .. ARGV[2]
for i, entry in ipairs(read_sliced('HMGET', KEYS[3], ids)) do
  if entry == planned then
    ours[#ours + 1] = ids[i]
  end
end
if #ours == 0 then
  return 0
end
write_sliced('HDEL', KEYS[6], ours)
return write_sliced('HDEL', KEYS[3], ours)
