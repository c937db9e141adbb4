#!lua flags=allow-oom
-- Records that a rank's part of the checkpoint with a recovery token is on disk. The commit counts
-- once every rank has called.
--
-- Arguments: ARGV[1] session epoch    ARGV[2] token's step    ARGV[3] token's manifest hash
--            ARGV[4] session name, or "", see stepped.lua
--            ARGV[5] dp_rank
-- Reply:     1, or 0 where it was committed before, or other ranks have not called
-- Errors:
--   NORUN     no such run
--   FENCED    another trainer session has started
--   BEHIND    a rank has this step, or one before it, from another manifest
--   CONFLICT  the step was not stepped, or trained from another manifest; or no rank of the session

local FRONTIER, BATCHES, TIMES, WAKE, RANKS = unpack(KEYS)

-- include: turnstream_server.bus.leadership/server_time.lua
-- include: present_session.lua

local epoch, stepped, committed, checkpoints, session, lost, world_size = unpack(redis.call('HMGET',
  FRONTIER, 'session_epoch', 'stepped', 'committed', 'checkpoints', 'session', 'session_lost',
  'dp_world_size'))
local refusal = refused(epoch, session, ARGV[1], ARGV[4])
if refusal then
  return refusal
end
local step = tonumber(ARGV[2])
if lost and step >= tonumber(string.match(lost, '^%d+')) then
  return redis.error_reply('BEHIND ' .. string.match(lost, ':(.*)$'))
end
if step > tonumber(stepped) then
  return redis.error_reply('CONFLICT step ' .. step .. ' is not stepped; the newest such step is '
    .. stepped)
end
local hash = step == 0 and '' or hash_of(ARGV[2])
if hash ~= ARGV[3] then
  return redis.error_reply('CONFLICT step ' .. step .. ' has the manifest "' .. (hash or '')
    .. '", not "' .. ARGV[3] .. '"')
end
if step <= tonumber(committed) then
  return 0
end
if tonumber(ARGV[5]) >= tonumber(world_size) then
  return redis.error_reply('CONFLICT dp_rank ' .. ARGV[5] .. ' is none of the ' .. world_size
    .. ' ranks of the session')
end
redis.call('HSET', RANKS, 'committed:' .. ARGV[5], ARGV[2])
for rank = 0, tonumber(world_size) - 1 do
  if tonumber(redis.call('HGET', RANKS, 'committed:' .. rank) or 0) < step then
    return 0
  end
end
checkpoints = (checkpoints and checkpoints ~= '') and checkpoints .. ',' .. step or step
redis.call('HSET', FRONTIER, 'committed', step, 'checkpoints', checkpoints)
redis.call('HSET', TIMES, 'committed:' .. ARGV[2], now_text())
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return 1
