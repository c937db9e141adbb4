#!lua flags=allow-oom
-- Takes trajectories of a released batch out of the ledger, and leaves fingerprints of its groups.
-- Until `finish_batch` the plan names them, from then on a compact record.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash  read: epoch
--   KEYS[2] frontier  hash  read: released
--   KEYS[3] ledger    hash  removed: trajectory ids that are "planned:<step>"
--   KEYS[4] groups    hash  removed: names of groups that are planned or dropped
--   KEYS[5] over      hash  added: their fingerprints
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] step    ARGV[3] number of group names
--   ARGV[4...] that many group names, then trajectory ids
-- Reply: how many trajectories were taken out now, an integer
-- Errors:
--   FENCED    another planner leads
--   CONFLICT  the step is not released

local PER_BUCKET = 128
local OVER = {planned = true, filtered = true, expired = true, incomplete = true}

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local released = tonumber(redis.call('HGET', KEYS[2], 'released') or 0)
if tonumber(ARGV[2]) > released then
  return redis.error_reply('CONFLICT step ' .. ARGV[2] .. ' is not released; step ' .. released
    .. ' is')
end
local num_over = tonumber(redis.call('HGET', KEYS[5], 'n') or 0)

-- Linear hashing: with n buckets, the smallest power of two above n tells the bucket by the low bits
-- of a hash; where that bucket does not exist yet, half of that power does.
local function bucket_of(hash, num_buckets)
  local level = 1
  while level * 2 <= num_buckets do
    level = level * 2
  end
  local bucket = hash % (level * 2)
  return bucket < num_buckets and bucket or hash % level, level
end

local function split(num_buckets)
  local _, level = bucket_of(0, num_buckets)
  local old = num_buckets - level
  local packed = redis.call('HGET', KEYS[5], old) or ''
  local parts = {[old] = {}, [num_buckets] = {}}
  for start = 1, #packed, 8 do
    local a, b, c, d = string.byte(packed, start, start + 3)
    local hash = a * 1048576 + b * 4096 + c * 16 + math.floor(d / 16)
    local part = parts[bucket_of(hash, num_buckets + 1)]
    part[#part + 1] = string.sub(packed, start, start + 7)
  end
  for bucket, part in pairs(parts) do
    redis.call('HSET', KEYS[5], bucket, table.concat(part))
  end
end

local function add_over(name)
  local hex = string.sub(redis.sha1hex(name), 1, 16)
  local fingerprint = string.gsub(hex, '..', function(byte)
    return string.char(tonumber(byte, 16))
  end)
  local num_buckets = math.max(1, math.floor(num_over / PER_BUCKET))
  local bucket = bucket_of(tonumber(string.sub(hex, 1, 7), 16), num_buckets)
  redis.call('HSET', KEYS[5], bucket, (redis.call('HGET', KEYS[5], bucket) or '') .. fingerprint)
  num_over = num_over + 1
  if math.max(1, math.floor(num_over / PER_BUCKET)) > num_buckets then
    split(num_buckets)
  end
end

local last_group = 3 + ARGV[3]
for i = 4, last_group do
  local entry = redis.call('HGET', KEYS[4], ARGV[i])
  if entry and OVER[string.match(entry, ':(.*)$')] then
    redis.call('HDEL', KEYS[4], ARGV[i])
    add_over(ARGV[i])
  end
end
redis.call('HSET', KEYS[5], 'n', string.format('%.0f', num_over))
local ids = {unpack(ARGV, last_group + 1)}
if #ids == 0 then
  return 0
end
local ours = {}
local planned = 'planned:' .. ARGV[2]
for i, entry in ipairs(redis.call('HMGET', KEYS[3], unpack(ids))) do
  if entry == planned then
    ours[#ours + 1] = ids[i]
  end
end
return #ours > 0 and redis.call('HDEL', KEYS[3], unpack(ours)) or 0
