#!lua flags=allow-oom
-- Begins a trainer session after the batch that its recovery token names, and fences every session
-- before it. The same session again, before its first step, changes nothing.
--
-- A token is in a checkpoint on disk, so that the run is committed exactly up to it: what was
-- stepped or committed beyond it comes back.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash    read and changed: stepped, committed, session_epoch, session,
--                             session_token, dp_world_size, lineage, checkpoints, rollbacks,
--                             forks, session_ms; read: released; read and removed: session_lost
--   KEYS[2] batches   hash    read: step -> "<trajectories planned up to it>:<manifest hash>"
--   KEYS[3] wake      stream  added, so that calls of the session before find out
--   KEYS[4] sessions  hash    session name -> its epoch; added
--   KEYS[5] events    stream  added, where steps are undone: field r = the rolled_back record
--   KEYS[6] versions  stream  read: the newest
--   KEYS[7] ranks     hash    removed: what the ranks of the session before had
--   KEYS[8] times     hash    removed: when steps were stepped and committed that are undone; added:
--                             "committed:<step>" of the token, where nobody has said that before
-- Arguments:
--   ARGV[1] session name     ARGV[2] dp_world_size
--   ARGV[3] token's step, "" without a token    ARGV[4] token's manifest hash
--   ARGV[5] the rolled_back record of that step
-- Reply: {session epoch; next step; lineage; stepped before; committed before}
-- Errors:
--   NORUN     no such run
--   FENCED    the session has begun before, and another one since
--   BEHIND    this store does not have the batch that the token names; or the session is lost
--   RELEASED  the batches after the one that the token names are no longer retained
--   CONFLICT  no token, but batches are committed; or the session began otherwise, or has stepped

local MAX_ROLLBACKS = 16  -- every reader of the frontier reads them

local stepped, committed, epoch, session, began_with, world_size, lineage, planned, released,
  checkpoints, lost = unpack(redis.call('HMGET', KEYS[1], 'stepped', 'committed', 'session_epoch',
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

-- A rank that was killed may have asked before, and be heard only now.
local over = redis.call('HGET', KEYS[4], ARGV[1])
if over then
  return redis.error_reply('FENCED trainer session ' .. over .. ' has ended, ' .. epoch
    .. ' has begun')
end

-- 1. Is the token ours?
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
  local entry = redis.call('HGET', KEYS[2], ARGV[3])
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

-- Versions up to the newest are as old as this step, at least. An earlier fork behind a later step
-- says nothing any more.
local function note_fork()
  local newest = redis.call('XREVRANGE', KEYS[6], '+', '-', 'COUNT', 1)[1]
  local noted = {}
  for version, at in string.gmatch(redis.call('HGET', KEYS[1], 'forks') or '', '(%d+):(%d+)') do
    if tonumber(at) < step then
      noted[#noted + 1] = version .. ':' .. at
    end
  end
  if newest then
    local version = tonumber(string.match(newest[1], '^%d+')) - 1
    noted[#noted + 1] = string.format('%.0f:%.0f', version, step)
  end
  if #noted > 0 then
    redis.call('HSET', KEYS[1], 'forks', table.concat(noted, ','))
  end
end

-- 2. Begin.
if step ~= stepped then
  -- "main", "main-1", "main-2" ...; of a forked run "maze@12", "maze@12-1" ...
  local name, forks = string.match(lineage, '^(.*)%-(%d+)$')
  lineage = (name or lineage) .. '-' .. (forks or 0) + 1
  local rollbacks = redis.call('HGET', KEYS[1], 'rollbacks')
  local told = {lineage .. ':' .. step .. ':' .. stepped}
  for earlier in string.gmatch(rollbacks or '', '[^,]+') do
    if #told < MAX_ROLLBACKS then
      told[#told + 1] = earlier
    end
  end
  redis.call('HSET', KEYS[1], 'rollbacks', table.concat(told, ','))
  note_fork()
  redis.call('XADD', KEYS[5], '*', 'r', ARGV[5])
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
local time = redis.call('TIME')
local now_ms = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
for undone = step + 1, stepped do
  redis.call('HDEL', KEYS[8], string.format('stepped:%.0f', undone),
    string.format('committed:%.0f', undone))
end
if step > 0 then
  redis.call('HSETNX', KEYS[8], string.format('committed:%.0f', step), now_ms)
end
redis.call('HSET', KEYS[1], 'stepped', step, 'committed', step, 'session_epoch', epoch + 1,
  'session', ARGV[1], 'session_ms', now_ms, 'session_token', token, 'dp_world_size', ARGV[2],
  'lineage', lineage, 'checkpoints', table.concat(kept, ','))
redis.call('HDEL', KEYS[1], 'session_lost')
redis.call('DEL', KEYS[7])
redis.call('HSET', KEYS[4], ARGV[1], epoch + 1)
redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'w', '')
return {epoch + 1, step + 1, lineage, stepped, committed}
