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

-- include: turnstream.store.run/server_time.lua
-- include: present_session.lua

local frontier, refusal = present_session(ARGV[1], ARGV[4])
if refusal then
  return refusal
end
local step, lost, world_size = tonumber(ARGV[2]), frontier.session_lost, frontier.dp_world_size
if lost and step >= tonumber(string.match(lost, '^%d+')) then
  return lost_session(lost)
elseif step > tonumber(frontier.stepped) then
  return redis.error_reply('CONFLICT step ' .. step .. ' is not stepped; the newest such step is '
    .. frontier.stepped)
end
refusal = manifest_refusal(step, step == 0 and '' or hash_of(ARGV[2]), ARGV[3])
if refusal or step <= tonumber(frontier.committed) then
  return refusal or 0
end
refusal = rank_refusal(ARGV[5], world_size)
if refusal then
  return refusal
end
redis.call('HSET', RANKS, 'committed:' .. ARGV[5], ARGV[2])
for rank = 0, tonumber(world_size) - 1 do
  if tonumber(redis.call('HGET', RANKS, 'committed:' .. rank) or 0) < step then
    return 0
  end
end
local before = frontier.checkpoints or ''
local checkpoints = before == '' and step or before .. ',' .. step
redis.call('HSET', FRONTIER, 'committed', step, 'checkpoints', checkpoints)
redis.call('HSET', TIMES, 'committed:' .. ARGV[2], now_text())
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return 1
