#!lua
-- Appends prompts to those of a run. The same prompts again change nothing. A finished prompt is not
-- compared: its content is deleted.
--
-- Arguments: ARGV[1] number of the first of them, from 1    ARGV[2] their largest num_samples
--            ARGV[3...] records: "<num_samples>/<num_needed>:<encoded prompt_uid>:<payload>"
-- Reply:     number of prompts ever added to the run

local FRONTIER, PROMPTS, WAKE = unpack(KEYS)
local FIRST = 3
local closed = redis.call('HGET', FRONTIER, 'closed')
if not closed then
  return redis.error_reply('NORUN no such run')
end
local first = tonumber(ARGV[1])
local added, most = unpack(redis.call('HMGET', PROMPTS, 'added', 'most_samples'))
added, most = tonumber(added or 0), tonumber(most or 0)
if first > added + 1 then
  return redis.error_reply('CONFLICT prompt ' .. first .. ' does not follow prompt ' .. added)
end
local last = first + #ARGV - FIRST
for number = first, math.min(added, last) do
  local stored = redis.call('HGET', PROMPTS, number)
  if stored and stored ~= ARGV[number - first + FIRST] then
    return redis.error_reply('CONFLICT prompt ' .. number .. ' is there with another content')
  end
end
if last <= added then
  return added
end
if closed ~= '0' then
  return redis.error_reply('CLOSED the run takes no new prompt')
end
for number = added + 1, last do
  redis.call('HSET', PROMPTS, number, ARGV[number - first + FIRST])
end
redis.call('HSET', PROMPTS, 'added', last, 'most_samples', math.max(most, tonumber(ARGV[2])))
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return last
