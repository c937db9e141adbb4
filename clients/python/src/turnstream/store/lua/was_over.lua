#!lua flags=allow-oom
-- Part of open_group, post_reward, read_group and reopen_task: whether a group is over and gone,
-- by its fingerprint, see store/keys.py.
--
-- Needs OVER, a key:  hash  read
-- Gives was_over(name), of a group; true also of about one other name in 10^12.

local function was_over(name)
  local num_buckets = math.max(1, math.floor((redis.call('HGET', OVER, 'n') or 0) / 64))
  local level = 1
  while level * 2 <= num_buckets do
    level = level * 2
  end
  local hex = string.sub(redis.sha1hex(name), 1, 16)
  local hash = tonumber(string.sub(hex, 1, 7), 16)
  local bucket = hash % (level * 2)
  if bucket >= num_buckets then
    bucket = hash % level
  end
  local packed = redis.call('HGET', OVER, bucket) or ''
  local fingerprint = string.gsub(hex, '..', function(byte)
    return string.char(tonumber(byte, 16))
  end)
  local start = string.find(packed, fingerprint, 1, true)
  while start and start % 8 ~= 1 do  -- across two fingerprints
    start = string.find(packed, fingerprint, start + 1, true)
  end
  return start ~= nil
end
