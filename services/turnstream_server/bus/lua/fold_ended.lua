#!lua flags=allow-oom
-- Takes trajectories that ended untrained out of the ledger and leaves a compact record, counts of
-- their reasons, and fingerprints of the groups that were dropped, all or nothing.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash  read: epoch
--   KEYS[2] frontier  hash  changed: ends, the number of the newest record
--   KEYS[3] ledger    hash  removed: the trajectory ids
--   KEYS[4] groups    hash  read; removed: names of groups that were dropped
--   KEYS[5] over      hash  added: their fingerprints
--   KEYS[6] ended     hash  added: number -> record
--   KEYS[7] reasons   hash  changed: "<state>:<reason>" -> how many
--   KEYS[8] rewards   hash  removed: the trajectory ids
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] number of the record    ARGV[3] the record
--   ARGV[4...] trajectory ids
-- Reply: 1, or 0 where this record was written before
-- Errors:
--   FENCED    another planner leads
--   CONFLICT  the number is not the next one, or a trajectory has not ended, or its group may still change

local PER_BUCKET = 64
local MOST_REASONS = 1000  -- generators make some of them up
local OVER = {planned = true, filtered = true, expired = true, incomplete = true, surplus = true,
  evaluated = true, over = true}
local ENDS = {filtered = true, expired = true, surplus = true, incomplete = true, evaluated = true,
  abandoned = true}

local function has_ended(entry)
  return ENDS[string.match(entry, '^[^:]*')] or string.sub(entry, 1, 14) == 'dead:discarded'
end

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local newest = tonumber(redis.call('HGET', KEYS[2], 'ends') or 0)
if tonumber(ARGV[2]) <= newest then
  return 0
end
if tonumber(ARGV[2]) ~= newest + 1 then
  return redis.error_reply('CONFLICT record ' .. ARGV[2] .. ' does not follow ' .. newest)
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

-- 1. Nothing is written before every trajectory has been looked at.
local ids = {unpack(ARGV, 4)}
local entries = redis.call('HMGET', KEYS[3], unpack(ids))
local groups = {}
for i, id in ipairs(ids) do
  local entry = entries[i] or 'unknown'
  if not has_ended(entry) then
    return redis.error_reply('CONFLICT ' .. id .. ' is ' .. entry .. ', not at its end')
  end
  local group = string.match(id, '^[^/]*')
  if groups[group] == nil then
    groups[group] = redis.call('HGET', KEYS[4], group) or 'over'
    local state = string.match(groups[group], '[^:]*$')
    if not OVER[state] then
      return redis.error_reply('CONFLICT group ' .. group .. ' of ' .. id .. ' is ' .. state)
    end
  end
end

-- 2. Write.
local numbers = {}
for _, entry in ipairs(entries) do
  numbers[entry] = (numbers[entry] or 0) + 1
end
for reason, number in pairs(numbers) do
  if redis.call('HEXISTS', KEYS[7], reason) == 0
    and redis.call('HLEN', KEYS[7]) >= MOST_REASONS then
    reason = string.match(reason, '^[^:]*') .. ':another reason'
  end
  redis.call('HINCRBY', KEYS[7], reason, number)
end
for group, entry in pairs(groups) do
  -- A group that is planned goes with its batch.
  if entry ~= 'over' and not string.find(entry, ':planned', 1, true) then
    redis.call('HDEL', KEYS[4], group)
    add_over(group)
  end
end
redis.call('HSET', KEYS[5], 'n', string.format('%.0f', num_over))
redis.call('HDEL', KEYS[3], unpack(ids))
redis.call('HDEL', KEYS[8], unpack(ids))
redis.call('HSET', KEYS[6], ARGV[2], ARGV[3])
redis.call('HSET', KEYS[2], 'ends', ARGV[2])
return 1
