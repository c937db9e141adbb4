#!lua flags=allow-oom
-- Write the result of a sample, once, while its session is open.
-- KEYS  sampler, results
-- ARGV  number, result
-- Reply 1 if it was written, else 0
-- Runs also when the server is full: a finished sample is deleted from its stream.
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('HEXISTS', KEYS[1], 'ended') == 1 then
  return 0
end
return redis.call('HSETNX', KEYS[2], ARGV[1], ARGV[2])
