#!lua
-- Part of open_group: the number of attempts that a sample may have without a granted refill.
--
-- A script that decides a group reads and ends every attempt of it. So samples, attempts and the bytes
-- of the group's name are limited together: see most_samples in groups.py.
--
-- Gives most_attempts(group, num_samples), an integer. It is 0 for a group that cannot be opened.

local MOST_GROUP_BYTES = 524288
local LEAST_NAME_BYTES = 128
local ATTEMPT_LIMIT = 1000

local function most_attempts(group, num_samples)
  local bytes = num_samples * math.max(LEAST_NAME_BYTES, #group)
  return math.min(ATTEMPT_LIMIT, math.floor(MOST_GROUP_BYTES / bytes))
end
