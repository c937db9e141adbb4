#!lua
-- Part of end_orphaned: the attempts of a group that were ever opened.
--
-- Up to ALL_READ, every attempt is read: a restarted store may have lost one before a known one. Above,
-- where only granted refills and earlier releases come, an attempt is read if the one before it was
-- opened. So the work never follows the product of samples and attempts.
--
-- Needs LEDGER and MEMBERS, keys, and read_sliced of slices.lua.
-- Gives each_attempt(group, num_samples, take). It calls take(ids, entries) with the ids of some
--       attempts and their ledger entries, false for none, and ends once a call returns true.

local ALL_READ = 4096  -- attempts of all samples; MOST_GROUP_BYTES / LEAST_NAME_BYTES of group_limits.lua

local function each_attempt(group, num_samples, take)
  local highest = string.match(redis.call('HGET', MEMBERS, group) or '', '^%d*:(%d+)') or 0
  local reads_all = num_samples * (highest + 1) <= ALL_READ
  local samples = {}
  for sample = 0, num_samples - 1 do
    samples[#samples + 1] = sample
  end
  for attempt = 0, tonumber(highest) do
    if #samples == 0 then
      return
    end
    local ids = {}
    for i, sample in ipairs(samples) do
      ids[i] = group .. '/' .. sample .. '/' .. attempt
    end
    local entries = read_sliced('HMGET', LEDGER, ids)
    if take(ids, entries) then
      return
    end
    local tried = {}
    for i, sample in ipairs(samples) do
      if reads_all or entries[i] or attempt == 0 then  -- attempt 1 may be granted before attempt 0 was opened
        tried[#tried + 1] = sample
      end
    end
    samples = tried
  end
end
