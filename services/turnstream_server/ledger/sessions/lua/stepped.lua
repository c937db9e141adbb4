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

-- include: turnstream.store.run/server_time.lua
-- include: present_session.lua

local frontier, refusal = present_session(ARGV[1], ARGV[4])
if refusal then
  return refusal
elseif frontier.session_lost then
  return lost_session(frontier.session_lost)
end
local step, planned, stepped = tonumber(ARGV[2]), frontier.planned or 0, frontier.stepped
if step > tonumber(planned) then
  return redis.error_reply('BEHIND step ' .. step .. ' was trained from the manifest "' .. ARGV[3]
    .. '", but the newest batch of this store is ' .. planned)
elseif step > stepped + 1 then
  return redis.error_reply('CONFLICT step ' .. step .. ' does not follow step ' .. stepped)
end
local hash = hash_of(ARGV[2])
refusal = rank_refusal(ARGV[5], frontier.dp_world_size) or manifest_refusal(step, hash, ARGV[3])
if refusal then
  return refusal
end

-- Return the first rank whose newest stepped batch is before this one, or another one.
local function rank_behind()
  for rank = 0, tonumber(frontier.dp_world_size) - 1 do
    local entry = redis.call('HGET', RANKS, 'stepped:' .. rank) or ''
    local newest, hash = string.match(entry, '^(%d+):(.*)$')
    if not newest or tonumber(newest) < step or hash_of(newest) ~= hash then
      return rank
    end
  end
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
return frontier.lineage
