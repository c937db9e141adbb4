#!lua flags=allow-oom
-- Acknowledges that the optimizer has taken the last update of a step, which all ranks of the session
-- are known to have from the same manifest. A call may speak for all ranks, or for one: then the step
-- is acknowledged once every rank has called.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash    read: session_epoch, lineage, dp_world_size, session_lost; changed:
--                             stepped
--   KEYS[2] batches   hash    read: step -> "<trajectories planned up to it>:<manifest hash>"
--   KEYS[3] wake      stream  added, to wake waiting callers
--   KEYS[4] ranks     hash    read: dp_rank -> "<step>:<manifest hash>", the newest that it has;
--                             changed: "stepped:<dp_rank>", the same of the newest it has stepped
--   KEYS[5] times     hash    "stepped:<step>" -> server ms; added
-- Arguments: ARGV[1] session epoch    ARGV[2] step    ARGV[3] manifest hash
--            ARGV[4] session name, or "": a store that lost a session may give its epoch to another
--            ARGV[5] dp_rank that the call speaks for; "" or nothing for all
-- Reply:     the run's lineage, for the recovery token; the same again for an earlier step
-- Errors:
--   NORUN     no such run
--   FENCED    another trainer session has started
--   BEHIND    this store has no such batch: it was lost; or the session is, see record_rank.lua
--   CONFLICT  not the next step, or trained from another manifest; or no rank of the session
--   RANK_UNCONFIRMED  a rank is not known to have this batch, or to have stepped it: its next call says so

-- include: present_session.lua

local speaker = ARGV[5] or ''
local epoch, stepped, lineage, session, planned, world_size, lost = unpack(redis.call('HMGET',
  KEYS[1], 'session_epoch', 'stepped', 'lineage', 'session', 'planned', 'dp_world_size',
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
if speaker ~= '' and tonumber(speaker) >= tonumber(world_size) then
  return redis.error_reply('CONFLICT dp_rank ' .. speaker .. ' is none of the ' .. world_size
    .. ' ranks of the session')
end

local function hash_of(number)
  return string.match(redis.call('HGET', KEYS[2], number) or '', ':(.*)$')
end

-- The first rank whose newest batch is before this one, or another; a batch behind it follows it, by
-- its hash.
local function rank_behind(first_rank, prefix)
  for rank = first_rank, tonumber(world_size) - 1 do
    local entry = redis.call('HGET', KEYS[4], prefix .. rank) or ''
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
if step == stepped + 1 and speaker ~= '' then
  redis.call('HSET', KEYS[4], 'stepped:' .. speaker, ARGV[2] .. ':' .. hash)
  local rank = rank_behind(0, 'stepped:')
  if rank then
    return redis.error_reply('RANK_UNCONFIRMED step ' .. step .. ': dp_rank ' .. rank .. ' has not stepped it')
  end
end
if step == stepped + 1 then
  local rank = speaker == '' and rank_behind(1, '')
  if rank then
    return redis.error_reply('RANK_UNCONFIRMED step ' .. step .. ': this store does not know that dp_rank '
      .. rank .. ' has it from the manifest "' .. ARGV[3] .. '"')
  end
  redis.call('HSET', KEYS[1], 'stepped', step)
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[5], 'stepped:' .. ARGV[2],
    string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
  redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'w', '')
end
return lineage
