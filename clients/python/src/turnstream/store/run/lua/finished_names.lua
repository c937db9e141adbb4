#!lua flags=allow-oom
-- Included: is_finished_name(name), whether a group of this name is finished and no longer in `groups`;
-- true also of about one other name in 10^12. OVER is the key `over`: bucket -> fingerprints, which
-- the leader adds, see fingerprint_of in release_writes.py.
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
