#!lua
-- Included: defines skip_finished(model, results, first), which moves the number that runs next over
-- those that have results, and returns it.
local function skip_finished(model, results, first)
  local number = first
  while redis.call('HEXISTS', results, number) == 1 do
    number = number + 1
  end
  if number > first then
    redis.call('HSET', model, 'next', number)
  end
  return number
end
