#!lua flags=allow-oom
-- Records that payload of a planned step is damaged, for `turnstream why`.
--
-- Arguments: ARGV[1] step    ARGV[2] manifest hash    ARGV[3] the sentence
-- Reply:     1, or 0 where the step has another plan, or is stepped

local FRONTIER, BATCHES = unpack(KEYS)
local stepped = redis.call('HGET', FRONTIER, 'stepped')
local hash = string.match(redis.call('HGET', BATCHES, ARGV[1]) or '', ':(.*)$')
if not stepped or tonumber(ARGV[1]) <= tonumber(stepped) or hash ~= ARGV[2] then
  return 0
end
redis.call('HSET', FRONTIER, 'damaged', ARGV[1] .. ':' .. ARGV[2] .. ':' .. ARGV[3])
return 1
