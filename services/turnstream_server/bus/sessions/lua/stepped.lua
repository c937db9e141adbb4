#!lua flags=allow-oom
-- Records that a rank's optimizer took the last update of a step. The step counts once every rank
-- has called, with the same manifest.
--
-- Arguments: ARGV[1] session epoch    ARGV[2] step    ARGV[3] manifest hash
--            ARGV[4] session name, or "": a store that lost a session may reuse its epoch
--            ARGV[5] dp_rank
-- Reply:     the run's lineage, for the recovery token; the same for an earlier step
-- Errors:
--   NORUN     no such run
--   FENCED    another trainer session has started
--   BEHIND    this store has lost the batch, or the session is lost, see record_rank.lua
--   CONFLICT  not the next step, or trained from another manifest; or no rank of the session
--   RANK_UNCONFIRMED  another rank has not called yet

local FRONTIER, BATCHES, WAKE, RANKS, TIMES = unpack(KEYS)

-- include: turnstream_server.bus.leadership/server_time.lua
-- include: present_session.lua

local epoch, stepped, lineage, session, planned, world_size, lost = unpack(redis.call('HMGET',
  FRONTIER, 'session_epoch', 'stepped', 'lineage', 'session', 'planned', 'dp_world_size',
  'session_lost'))
local refusal = refused(epoch, session, ARGV[1], ARGV[4])
if refusal then
  return refusal
end
if lost then
  return redis.error_reply('BEHIND ' .. string.match(lost, ':(.*)$'))
end
local step = tonumber(ARGV[2])
if step > tonumber(planned or 0) then
  return redis.error_reply('BEHIND step ' .. step .. ' was trained from the manifest "' .. ARGV[3]
    .. '", but the newest batch of this store is ' .. (planned or 0))
end
if step > stepped + 1 then
  return redis.error_reply('CONFLICT step ' .. step .. ' does not follow step ' .. stepped)
end
if tonumber(ARGV[5]) >= tonumber(world_size) then
  return redis.error_reply('CONFLICT dp_rank ' .. ARGV[5] .. ' is none of the ' .. world_size
    .. ' ranks of the session')
end

-- Return the first rank whose newest stepped batch is before this one, or another one.
local function rank_behind()
  for rank = 0, tonumber(world_size) - 1 do
    local entry = redis.call('HGET', RANKS, 'stepped:' .. rank) or ''
    local newest, hash = string.match(entry, '^(%d+):(.*)$')
    if not newest or tonumber(newest) < step or hash_of(newest) ~= hash then
      return rank
    end
  end
end

local hash = hash_of(ARGV[2])
if hash ~= ARGV[3] then
  return redis.error_reply('CONFLICT step ' .. step .. ' has the manifest "' .. (hash or '')
    .. '", not "' .. ARGV[3] .. '"')
end
if step == stepped + 1 then
  redis.call('HSET', RANKS, 'stepped:' .. ARGV[5], ARGV[2] .. ':' .. hash)
  local rank = rank_behind()
  if rank then
    return redis.error_reply('RANK_UNCONFIRMED step ' .. step .. ': dp_rank ' .. rank
      .. ' has not stepped it')
  end
  redis.call('HSET', FRONTIER, 'stepped', step)
  redis.call('HSET', TIMES, 'stepped:' .. ARGV[2], now_text())
  redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
end
return lineage
