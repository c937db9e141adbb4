#!lua
-- Part of create_run and fork_run: which run of a name may be created now.
--
-- A deletion increments `incarnation` at once, so that the next run of the name can be created. Without
-- that key a tombstone `deleted` stands for it.

-- Returns nil where the run with the number `asked` may be created, or exists; else the number of the
-- next run.
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
