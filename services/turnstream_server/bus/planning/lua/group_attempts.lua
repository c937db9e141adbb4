#!lua
-- Part of end_members and end_orphaned: the attempts of a group that were ever opened.
--
-- An attempt is opened after the one before it. So the work follows the number of opened attempts, and
-- not the product of samples and attempts.
--
-- Needs LEDGER and MEMBERS, keys, and read_sliced of slices.lua.
-- Gives each_attempt(group, num_samples, take). It calls take(ids, entries) with the ids of some
--       attempts and their ledger entries, false for none, and ends once a call returns true.

local function each_attempt(group, num_samples, take)
  local highest = string.match(redis.call('HGET', MEMBERS, group) or '', '^%d*:(%d+)') or 0
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
      if entries[i] or attempt == 0 then  -- attempt 1 may be granted before attempt 0 was opened
        tried[#tried + 1] = sample
      end
    end
    samples = tried
  end
end
