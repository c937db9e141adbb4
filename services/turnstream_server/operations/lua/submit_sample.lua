-- Record a call of a sampling session, once.
-- KEYS  sampler, samples, results
-- ARGV  number, fingerprint, result of a refused call or ''
-- Reply accepted, repeated, finished (repeated, and it has a result), conflict, unknown, or ended
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 'unknown'
end
local known = redis.call('HGET', KEYS[2], ARGV[1])
if known then
  if known ~= ARGV[2] then
    return 'conflict'
  end
  return redis.call('HEXISTS', KEYS[3], ARGV[1]) == 1 and 'finished' or 'repeated'
end
if redis.call('HEXISTS', KEYS[1], 'ended') == 1 then
  return 'ended'
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[3], ARGV[1], ARGV[3])
  return 'finished'
end
return 'accepted'
