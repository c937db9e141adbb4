#!lua
-- Gives a run prompts to be given out in this order. The same prompts again change nothing.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash    read: closed
--   KEYS[2] prompts   hash    number -> record, added; changed: added, the number of the newest
--   KEYS[3] wake      stream  added, so that whoever waits for a task is told
--   KEYS[4] config    hash    read: newest, and that revision's JSON
-- Arguments:
--   ARGV[1] number of the first of them, from 1
--   ARGV[2...] records: "<num_samples>/<num_needed>:<bytes of prompt_uid>:<prompt_uid><payload>"
-- Reply: how many prompts the run was ever given
-- Errors:
--   NORUN     no such run
--   CLOSED    new prompts for a closed run
--   CONFLICT  a prompt with one of these numbers is there with another content, or one before them
--             is missing. A prompt that is done is not compared: nothing of it is kept
--   TOOLARGE  a new prompt has more samples than max_samples
--   INVALID   a record cannot be read

local PROMPTS, CONFIG = KEYS[2], KEYS[4]
local closed = redis.call('HGET', KEYS[1], 'closed')
if not closed then
  return redis.error_reply('NORUN no such run')
end
local first = tonumber(ARGV[1])
local added = tonumber(redis.call('HGET', PROMPTS, 'added') or 0)
if first > added + 1 then
  return redis.error_reply('CONFLICT prompt ' .. first .. ' does not follow prompt ' .. added)
end
local last = first + #ARGV - 2
for number = first, math.min(added, last) do
  local stored = redis.call('HGET', PROMPTS, number)
  if stored and stored ~= ARGV[number - first + 2] then
    return redis.error_reply('CONFLICT prompt ' .. number .. ' is there with another content')
  end
end
if last <= added then
  return added
end
if closed ~= '0' then
  return redis.error_reply('CLOSED the run takes no new prompt')
end

-- include: max_samples.lua

local config = cjson.decode(redis.call('HGET', CONFIG, redis.call('HGET', CONFIG, 'newest')))
for number = added + 1, last do
  local samples, needed = string.match(ARGV[number - first + 2], '^(%d+)/(%d+):%d+:')
  samples, needed = tonumber(samples), tonumber(needed)
  if not samples or samples < 1 or needed < 1 or needed > samples then
    return redis.error_reply('INVALID prompt ' .. number .. ' has no num_samples/num_needed')
  end
  local too_many = why_too_many(samples, config)
  if too_many then
    return redis.error_reply('TOOLARGE prompt ' .. number .. ': ' .. too_many)
  end
end
for number = added + 1, last do
  redis.call('HSET', PROMPTS, number, ARGV[number - first + 2])
end
redis.call('HSET', PROMPTS, 'added', last)
redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'w', '')
return last
