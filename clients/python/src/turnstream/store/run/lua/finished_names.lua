#!lua flags=allow-oom
-- Part of fold_ended, next_task, open_group, post_reward and read_group: the names of
-- groups that are finished and no longer in `groups`.
--
-- Needs OVER, a key:  hash  bucket -> fingerprints; read, changed by add_finished
-- Needs read_sliced and write_sliced of slices.lua for add_finished.
-- Gives is_finished_name(name); true also of about one other name in 10^12, and
--       add_finished(names), of groups that are not in it yet, each of them once.
--
-- A fingerprint is the first 8 bytes of the SHA-1 of the name. Its bucket is the first 3 hex digits:
-- 4,096 buckets, so a lookup reads 2 KB at a million groups.

local function fingerprint_of(name)
  local hex = redis.sha1hex(name)
  local bytes = string.gsub(string.sub(hex, 1, 16), '..', function(byte)
    return string.char(tonumber(byte, 16))
  end)
  return string.sub(hex, 1, 3), bytes
end

local function is_finished_name(name)
  local bucket, fingerprint = fingerprint_of(name)
  local packed = redis.call('HGET', OVER, bucket) or ''
  local start = string.find(packed, fingerprint, 1, true)
  while start and start % 8 ~= 1 do  -- across two fingerprints
    start = string.find(packed, fingerprint, start + 1, true)
  end
  return start ~= nil
end

local function add_finished(names)
  local buckets, added = {}, {}
  for _, name in ipairs(names) do
    local bucket, fingerprint = fingerprint_of(name)
    if not added[bucket] then
      buckets[#buckets + 1] = bucket
    end
    added[bucket] = (added[bucket] or '') .. fingerprint
  end
  local changes = {}
  for i, packed in ipairs(read_sliced('HMGET', OVER, buckets)) do
    changes[#changes + 1] = buckets[i]
    changes[#changes + 1] = (packed or '') .. added[buckets[i]]
  end
  write_sliced('HSET', OVER, changes)
end
