#!lua flags=allow-oom
-- Included: damaged(key, ...), the error DAMAGED that names a damaged counter of a hash: one of the
-- named fields, or of all where none is named. nil where all are whole numbers of at most 18 digits.
-- HINCRBY fails at a field that is no whole number, and Redis keeps the earlier writes of the script.

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
