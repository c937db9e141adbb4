#!lua flags=allow-oom
-- Starts a trainer session after the batch of its recovery token, and fences every earlier session.
-- Later steps are undone. A repeat before the first step of the session changes nothing.
-- Admission waits for announcements once the session has announced a version: a trainer that died
-- before an announcement, or was replaced by one that announces none, does not stop the run.
--
-- Arguments:
--   ARGV[1] session name     ARGV[2] dp_world_size
--   ARGV[3] token's step, "" without a token    ARGV[4] token's manifest hash
--   ARGV[5] the rolled_back record of that step
-- Reply: {session epoch; next step; lineage; stepped before; committed before}
-- Errors:
--   NORUN     no such run
--   FENCED    the session has started before, and another one since
--   BEHIND    this store does not have the batch that the token names; or the session is lost
--   RELEASED  the batches after the one that the token names are no longer retained
--   CONFLICT  no token, but batches are committed; or the session started otherwise, or has stepped

local FRONTIER, BATCHES, WAKE, SESSIONS, EVENTS, RANKS, TIMES = unpack(KEYS)
local MAX_ROLLBACKS = 16  -- every reader of the frontier reads them

local stepped, committed, epoch, session, began_with, world_size, lineage, planned, released,
  checkpoints, lost = unpack(redis.call('HMGET', FRONTIER, 'stepped', 'committed', 'session_epoch',
    'session', 'session_token', 'dp_world_size', 'lineage', 'planned', 'released', 'checkpoints',
    'session_lost'))
if not stepped then
  return redis.error_reply('NORUN no such run')
end
stepped, committed, planned = tonumber(stepped), tonumber(committed), tonumber(planned or 0)
local token = ARGV[3] .. ':' .. ARGV[4]

if session == ARGV[1] and session ~= '' then
  if began_with ~= token or world_size ~= ARGV[2] then
    return redis.error_reply('CONFLICT session ' .. session .. ' began with the token "'
      .. began_with .. '" for ' .. world_size .. ' ranks, not with "' .. token .. '" for '
      .. ARGV[2] .. '; every start of a trainer needs a session name of its own')
  end
  if lost then
    return redis.error_reply('BEHIND ' .. string.match(lost, ':(.*)$'))
  end
  if stepped ~= tonumber(ARGV[3] == '' and 0 or ARGV[3]) then
    return redis.error_reply('CONFLICT session ' .. session .. ' is at step ' .. stepped
      .. ' already; every start of a trainer needs a session name of its own')
  end
  return {tonumber(epoch), stepped + 1, lineage, stepped, committed}
end

-- A call of a killed rank may arrive late.
local over = redis.call('HGET', SESSIONS, ARGV[1])
if over then
  return redis.error_reply('FENCED trainer session ' .. over .. ' has ended, ' .. epoch
    .. ' has begun')
end

-- 1. Check the token.
local step = 0
if ARGV[3] == '' then
  if committed > 0 then
    return redis.error_reply('CONFLICT the run is committed up to step ' .. committed
      .. '; present the recovery token of a checkpoint, or the token of step 0 to begin again')
  end
else
  step = tonumber(ARGV[3])
  if step < tonumber(released or 0) then
    return redis.error_reply('RELEASED the token names step ' .. step .. ', but the steps up to '
      .. released .. ' are no longer retained: the oldest token that can be taken up is that of '
      .. 'step ' .. released)
  end
  local entry = redis.call('HGET', BATCHES, ARGV[3])
  local hash = step == 0 and '' or string.match(entry or '', ':(.*)$')
  if not hash then
    return redis.error_reply('BEHIND the token names step ' .. step
      .. ', but the newest batch of this store is ' .. planned)
  end
  if hash ~= ARGV[4] then
    return redis.error_reply('BEHIND the token names the manifest "' .. ARGV[4] .. '" as step '
      .. step .. ', this store has "' .. hash .. '"')
  end
end

-- 2. Start the session.
if step ~= stepped then
  -- "main", "main-1", "main-2" ...; in a forked run "maze@12", "maze@12-1" ...
  local name, forks = string.match(lineage, '^(.*)%-(%d+)$')
  lineage = (name or lineage) .. '-' .. (forks or 0) + 1
  local rollbacks = redis.call('HGET', FRONTIER, 'rollbacks')
  local newest = {lineage .. ':' .. step .. ':' .. stepped}
  for earlier in string.gmatch(rollbacks or '', '[^,]+') do
    if #newest < MAX_ROLLBACKS then
      newest[#newest + 1] = earlier
    end
  end
  redis.call('HSET', FRONTIER, 'rollbacks', table.concat(newest, ','))
  redis.call('XADD', EVENTS, '*', 'r', ARGV[5])
end
local kept = {}
for earlier in string.gmatch(checkpoints or '', '%d+') do
  if tonumber(earlier) < step then
    kept[#kept + 1] = earlier
  end
end
if step > 0 then
  kept[#kept + 1] = step
end
-- include: turnstream.store.run/server_time.lua
-- include: turnstream.store.run/slices.lua

local now_ms = now_text()
local undone_times = {}
for undone = step + 1, stepped do
  undone_times[#undone_times + 1] = string.format('stepped:%.0f', undone)
  undone_times[#undone_times + 1] = string.format('committed:%.0f', undone)
end
write_sliced('HDEL', TIMES, undone_times)
if step > 0 then
  redis.call('HSETNX', TIMES, string.format('committed:%.0f', step), now_ms)
end
redis.call('HSET', FRONTIER, 'stepped', step, 'committed', step, 'session_epoch', epoch + 1,
  'session', ARGV[1], 'session_ms', now_ms, 'session_token', token, 'dp_world_size', ARGV[2],
  'lineage', lineage, 'checkpoints', table.concat(kept, ','))
redis.call('HDEL', FRONTIER, 'session_lost', 'announced')
redis.call('DEL', RANKS)
redis.call('HSET', SESSIONS, ARGV[1], epoch + 1)
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return {epoch + 1, step + 1, lineage, stepped, committed}
