#!lua flags=no-writes
-- Reads the oldest granted attempts that are not open. One of many writers opens each by open_group.
--
-- Keys, all in the run's slot:
--   KEYS[1] groups   hash    read: group name -> "<num_samples>:<state>"
--   KEYS[2] members  hash    read: group name -> "<num_needed>:...:<prompt_uid>"
--   KEYS[3] refills  zset    read: trajectory ids in the order in which they were granted
--   KEYS[4] wake     stream  read: its last id
--   KEYS[5] frontier hash    read: there is such a run
-- Arguments: ARGV[1] how many at most
-- Reply: {last wake id, beyond which more may have been granted; then four per attempt: its
--         trajectory id, num_samples, num_needed, prompt_uid}
-- Errors: NORUN  no such run

if redis.call('EXISTS', KEYS[5]) == 0 then
  return redis.error_reply('NORUN no such run')
end
local last = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1]
local reply = {last and last[1] or '0-0'}
for _, id in ipairs(redis.call('ZRANGE', KEYS[3], 0, ARGV[1] - 1)) do
  local group = string.match(id, '^[^/]*')
  local num_samples = string.match(redis.call('HGET', KEYS[1], group) or '', '^%d+')
  local num_needed, prompt_uid = string.match(
    redis.call('HGET', KEYS[2], group) or '', '^(%d+):%d+:%d+:(.*)$')
  if num_samples and num_needed then
    reply[#reply + 1] = id
    reply[#reply + 1] = num_samples
    reply[#reply + 1] = num_needed
    reply[#reply + 1] = prompt_uid
  end
end
return reply
