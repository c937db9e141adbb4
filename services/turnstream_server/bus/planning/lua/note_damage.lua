#!lua flags=allow-oom
-- Notes that payload of a planned step is damaged, for whoever asks why nobody gets it.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash  read: stepped; changed: damaged, "<step>:<manifest hash>:<sentence>"
--   KEYS[2] batches   hash  read: step -> "<trajectories planned up to it>:<manifest hash>"
-- Arguments: ARGV[1] step    ARGV[2] manifest hash    ARGV[3] the sentence
-- Reply:     1, or 0 where the step has another plan by now, or is stepped

local stepped = redis.call('HGET', KEYS[1], 'stepped')
local hash = string.match(redis.call('HGET', KEYS[2], ARGV[1]) or '', ':(.*)$')
if not stepped or tonumber(ARGV[1]) <= tonumber(stepped) or hash ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], 'damaged', ARGV[1] .. ':' .. ARGV[2] .. ':' .. ARGV[3])
return 1
