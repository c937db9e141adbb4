#!lua flags=allow-oom
-- Part of fold_batch and fold_ended: the fingerprints of groups that are over, by linear hashing, see
-- store/keys.py. However many names there are: one read, one write.
--
-- Needs OVER, a key:  hash  added: fingerprints; changed: n
-- Needs read_sliced and write_sliced of slices.lua.
-- Gives leave_fingerprints(names), of group names, each of them once.
--
-- With n buckets, the smallest power of two above n tells the bucket by the low bits of a hash, which
-- is the first 28 bits of the fingerprint; where that bucket does not exist yet, half of that power
-- does. The next bucket takes from one other those whose next bit is set.

local PER_BUCKET = 64

local function num_buckets_for(num_over)
  return math.max(1, math.floor(num_over / PER_BUCKET))
end

-- The largest power of two that is not above a number.
local function level_of(num_buckets)
  local level = 1
  while level * 2 <= num_buckets do
    level = level * 2
  end
  return level
end

-- The four bytes of a number below 2^32, the highest first; arithmetic is cheaper than calls.
local function bytes_of(number)
  local d = number % 256
  number = (number - d) / 256
  local c = number % 256
  number = (number - c) / 256
  local b = number % 256
  return (number - b) / 256, b, c, d
end

-- The fingerprint of a name, and the hash in it.
local function fingerprint_of(name)
  local hex = redis.sha1hex(name)
  local high = tonumber(string.sub(hex, 1, 8), 16)
  local a, b, c, d = bytes_of(high)
  local packed = string.char(a, b, c, d, bytes_of(tonumber(string.sub(hex, 9, 16), 16)))
  return packed, (high - high % 16) / 16
end

-- The fingerprints that stay in a bucket, and those of the bucket that is `level` further on.
local function split(packed, level)
  local place, weight = 4, level * 16  -- of the bit, in the four bytes of the hash
  while weight >= 256 do
    place, weight = place - 1, weight / 256
  end
  local stay, go = {}, {}
  for start = 1, #packed, 8 do
    local byte = string.byte(packed, start + place - 1)
    local part = byte % (weight * 2) < weight and stay or go
    part[#part + 1] = string.sub(packed, start, start + 7)
  end
  return table.concat(stay), table.concat(go)
end

local function leave_fingerprints(names)
  local num_over = tonumber(redis.call('HGET', OVER, 'n') or 0)
  local num_before = num_buckets_for(num_over)
  num_over = num_over + #names
  local num_buckets = num_buckets_for(num_over)
  local level = level_of(num_buckets)
  local added = {}  -- bucket -> the fingerprints that go into it
  local wanted = {}  -- buckets that are read; those that are made now are empty
  local packed = {}  -- bucket -> its fingerprints

  local function want(bucket)
    if not packed[bucket] then
      packed[bucket] = ''
      wanted[#wanted + 1] = bucket
    end
  end

  for _, name in ipairs(names) do
    local fingerprint, hash = fingerprint_of(name)
    local bucket = hash % (level * 2)
    bucket = bucket < num_buckets and bucket or hash % level
    added[bucket] = (added[bucket] or '') .. fingerprint
    want(bucket)
  end
  for new = num_before, num_buckets - 1 do
    want(new - level_of(new))
  end
  for i, found in ipairs(read_sliced('HMGET', OVER, wanted)) do
    packed[wanted[i]] = found or ''
  end
  for new = num_before, num_buckets - 1 do
    local its_level = level_of(new)
    local old = new - its_level
    packed[old], packed[new] = split(packed[old], its_level)
  end
  for bucket, fingerprints in pairs(added) do
    packed[bucket] = packed[bucket] .. fingerprints
  end
  local changes = {'n', string.format('%.0f', num_over)}
  for bucket, fingerprints in pairs(packed) do
    changes[#changes + 1] = bucket
    changes[#changes + 1] = fingerprints
  end
  write_sliced('HSET', OVER, changes)
end
