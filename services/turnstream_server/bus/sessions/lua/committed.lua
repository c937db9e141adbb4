#!lua flags=allow-oom
-- Acknowledges that the checkpoint which holds a recovery token is on disk. A call may speak for all
-- ranks, or for the part of one: then the checkpoint is acknowledged once every rank has called.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash    read: session_epoch, stepped, session_lost, dp_world_size; changed:
--                             committed, which never falls here, and checkpoints
--   KEYS[2] batches   hash    read: step -> "<trajectories planned up to it>:<manifest hash>"
--   KEYS[3] times     hash    "committed:<step>" -> server ms; added
--   KEYS[4] wake      stream  added, so that the planner releases what no checkpoint needs
--   KEYS[5] ranks     hash    "committed:<dp_rank>" -> the newest step that it has committed; changed
-- Arguments: ARGV[1] session epoch    ARGV[2] token's step    ARGV[3] token's manifest hash
--            ARGV[4] session name, or "", see stepped.lua
--            ARGV[5] dp_rank that the call speaks for; "" or nothing for all
-- Reply:     1, or 0 where that much was committed before, or another rank is awaited
-- Errors:
--   NORUN     no such run
--   FENCED    another trainer session has started
--   BEHIND    a rank has this step, or one before it, from another manifest
--   CONFLICT  the step was not stepped, or trained from another manifest; or no rank of the session

-- include: present_session.lua

local speaker = ARGV[5] or ''
local epoch, stepped, committed, checkpoints, session, lost, world_size = unpack(redis.call('HMGET',
  KEYS[1], 'session_epoch', 'stepped', 'committed', 'checkpoints', 'session', 'session_lost',
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
local entry = redis.call('HGET', KEYS[2], ARGV[2])
local hash = step == 0 and '' or string.match(entry or '', ':(.*)$')
if hash ~= ARGV[3] then
  return redis.error_reply('CONFLICT step ' .. step .. ' has the manifest "' .. (hash or '')
    .. '", not "' .. ARGV[3] .. '"')
end
if step <= tonumber(committed) then
  return 0
end
if speaker ~= '' and tonumber(speaker) >= tonumber(world_size) then
  return redis.error_reply('CONFLICT dp_rank ' .. speaker .. ' is none of the ' .. world_size
    .. ' ranks of the session')
end
if speaker ~= '' then
  redis.call('HSET', KEYS[5], 'committed:' .. speaker, ARGV[2])
  for rank = 0, tonumber(world_size) - 1 do
    if tonumber(redis.call('HGET', KEYS[5], 'committed:' .. rank) or 0) < step then
      return 0
    end
  end
end
checkpoints = (checkpoints and checkpoints ~= '') and checkpoints .. ',' .. step or step
redis.call('HSET', KEYS[1], 'committed', step, 'checkpoints', checkpoints)
local time = redis.call('TIME')
redis.call('HSET', KEYS[3], 'committed:' .. ARGV[2],
  string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
redis.call('XADD', KEYS[4], 'MAXLEN', 1, '*', 'w', '')
return 1
