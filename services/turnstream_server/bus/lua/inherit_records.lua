#!lua
-- Gives a forked run compact records of batches that were trained in its origin.
--
-- Keys, all in the new run's slot:
--   KEYS[1] frontier  hash  read: origin; changed: inherited, once all records are there
--   KEYS[2] past      hash  added: step -> compact record
-- Arguments:
--   ARGV[1] the run's origin, as fork_run was told    ARGV[2] "1" where these are the last
--   ARGV[3...] two per record: its step, the record
-- Reply:  1
-- Errors:
--   NORUN  no run that was forked from there

if redis.call('HGET', KEYS[1], 'origin') ~= ARGV[1] then
  return redis.error_reply('NORUN no such run')
end
for i = 3, #ARGV, 2 do
  redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[i + 1])
end
if ARGV[2] == '1' then
  redis.call('HSET', KEYS[1], 'inherited', 1)
end
return 1
