#!lua flags=allow-oom
-- Part of abandon, discard_dead_letter, leader_write, open_group, post_reward, post_sealed and reserve:
-- refuses a damaged counter before the first write. HINCRBY fails at a field that is no whole number, and Redis keeps
-- the earlier writes of the script.
--
-- Gives damaged(key, ...), an error reply that names the damaged counter of a hash: one of the named
--       fields, or of all where none is named. nil where all are whole numbers of at most 18 digits.
-- Errors: DAMAGED  a counter is damaged: nothing was written

local function damaged(key, ...)
  local names = {...}
  local values = #names > 0 and redis.call('HMGET', key, ...) or redis.call('HVALS', key)
  for i, value in ipairs(values) do
    if value and value ~= '0' and (#value > 18 or not string.match(value, '^%-?[1-9]%d*$')) then
      local shown = string.gsub(string.sub(value, 1, 40), '[^\32-\126]', '?')
      return redis.error_reply('DAMAGED ' .. key .. ", field '"
        .. (names[i] or redis.call('HKEYS', key)[i]) .. "': \"" .. shown .. '" is not a whole number')
    end
  end
end
