#!lua flags=allow-oom
-- Replace the content of a result by a mark. The request stays finished: it never runs again.
-- KEYS  results
-- ARGV  number, mark
-- Reply 1 if there was a result, else 0
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
