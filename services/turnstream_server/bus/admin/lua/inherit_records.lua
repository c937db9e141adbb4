#!lua
-- Gives a forked run compact records of batches that were trained in its origin, and at last the
-- names of the files that hold the older ones.
--
-- Keys, all in the new run's slot:
--   KEYS[1] frontier  hash  read: origin; changed at last: cold, the newest step that is in a file;
--                           inherited
--   KEYS[2] past      hash  added: step -> compact record
--   KEYS[3] cold      hash  added at last: newest step of a file -> its name
--   KEYS[4] wake      stream  added at last, so that the planner moves old records to a file
-- Arguments:
--   ARGV[1] the run's origin, as fork_run was told
--   ARGV[2] "" for records; at last the newest step that is in a file, 0 where none is
--   ARGV[3...] two per record: its step, the record; at last two per file: its step, its name
-- Reply:  1
-- Errors:
--   NORUN  no run that was forked from there

if redis.call('HGET', KEYS[1], 'origin') ~= ARGV[1] then
  return redis.error_reply('NORUN no such run')
end
if redis.call('HEXISTS', KEYS[1], 'inherited') == 1 then
  return 1  -- a call that comes late: what it brings is there, or in a file of the run's own by now
end
for i = 3, #ARGV, 2 do
  redis.call('HSETNX', ARGV[2] == '' and KEYS[2] or KEYS[3], ARGV[i], ARGV[i + 1])
end
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[1], 'cold', ARGV[2], 'inherited', 1)
  redis.call('XADD', KEYS[4], 'MAXLEN', 1, '*', 'w', '')
end
return 1
