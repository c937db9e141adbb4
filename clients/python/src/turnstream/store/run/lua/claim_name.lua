#!lua
-- Part of create_run and fork_run: which run of a name may be created now.
--
-- Condemning a run moves `incarnation` on in the same moment, so the next one can be created at
-- once. A store of an older release has no such key: there a tombstone `deleted` stands for it.

-- Returns nil where the run with the number `asked` may be created, or is there; else the number
-- of the run that may be.
local function other_claimant(incarnation, deleted, asked)
  local current = tonumber(redis.call('GET', incarnation) or 1)
  if current == asked and redis.call('EXISTS', deleted) == 1 then
    current = asked + 1
    redis.call('SET', incarnation, current)
  end
  if current ~= asked then
    return current
  end
end
