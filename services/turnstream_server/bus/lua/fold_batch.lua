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
--   KEYS[6] rewards   hash  removed: the trajectory ids
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] step    ARGV[3] number of group names
--   ARGV[4...] that many group names, then trajectory ids
-- Reply: how many trajectories were taken out now, an integer
-- Errors:
--   FENCED    another planner leads
--   CONFLICT  the step is not released

local PER_BUCKET = 64
local OVER = {planned = true, filtered = true, expired = true, incomplete = true,
  surplus = true}

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local released = tonumber(redis.call('HGET', KEYS[2], 'released') or 0)
if tonumber(ARGV[2]) > released then
  return redis.error_reply('CONFLICT step ' .. ARGV[2] .. ' is not released; step ' .. released
    .. ' is')
end
local num_over = tonumber(redis.call('HGET', KEYS[5], 'n') or 0)
local num_buckets = math.max(1, math.floor(num_over / PER_BUCKET))
local level = 1
while level * 2 <= num_buckets do
  level = level * 2
end
local BYTES = {}  -- two hex digits -> the byte
for byte = 0, 255 do
  BYTES[string.format('%02x', byte)] = string.char(byte)
end

-- Linear hashing: with n buckets, the smallest power of two above n tells the bucket by the low bits
-- of a hash; where that bucket does not exist yet, half of that power does.
local function bucket_of(fingerprint, start)
  local a, b, c, d = string.byte(fingerprint, start, start + 3)
  local hash = a * 1048576 + b * 4096 + c * 16 + math.floor(d / 16)
  local bucket = hash % (level * 2)
  return bucket < num_buckets and bucket or hash % level
end

local function split()
  local old, new = num_buckets - level, num_buckets
  local packed = redis.call('HGET', KEYS[5], old) or ''
  num_buckets = num_buckets + 1
  if level * 2 <= num_buckets then
    level = level * 2
  end
  local parts = {[old] = {}, [new] = {}}
  for start = 1, #packed, 8 do
    local part = parts[bucket_of(packed, start)]
    part[#part + 1] = string.sub(packed, start, start + 7)
  end
  redis.call('HSET', KEYS[5], old, table.concat(parts[old]), new, table.concat(parts[new]))
end

local function add_over(name)
  local fingerprint = string.gsub(string.sub(redis.sha1hex(name), 1, 16), '..', BYTES)
  local bucket = bucket_of(fingerprint, 1)
  redis.call('HSET', KEYS[5], bucket, (redis.call('HGET', KEYS[5], bucket) or '') .. fingerprint)
  num_over = num_over + 1
  if math.floor(num_over / PER_BUCKET) > num_buckets then
    split()
  end
end

local last_group = 3 + ARGV[3]
if last_group > 3 then
  local names = {unpack(ARGV, 4, last_group)}
  local gone = {}
  for i, entry in ipairs(redis.call('HMGET', KEYS[4], unpack(names))) do
    if entry and OVER[string.match(entry, ':(.*)$')] then
      gone[#gone + 1] = names[i]
      add_over(names[i])
    end
  end
  if #gone > 0 then
    redis.call('HDEL', KEYS[4], unpack(gone))
    redis.call('HSET', KEYS[5], 'n', string.format('%.0f', num_over))
  end
end
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
if #ours == 0 then
  return 0
end
redis.call('HDEL', KEYS[6], unpack(ours))
return redis.call('HDEL', KEYS[3], unpack(ours))
