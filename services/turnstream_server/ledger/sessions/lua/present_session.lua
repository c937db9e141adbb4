#!lua
-- Part of stepped, committed, record_rank and announce_version: the present trainer session.
--
-- A call of an older release has no session name, or "". Withdrawn plans end the session: then its name in the
-- frontier is "".

-- The frontier as a table; and the error where a call is of another session, else nil.
local function present_session(own_epoch, own_session)
  local names = {'session_epoch', 'session', 'session_lost', 'dp_world_size', 'stepped', 'committed', 'planned',
    'released', 'checkpoints', 'lineage', 'version_floor', 'announced'}
  local frontier = {}
  for i, value in ipairs(redis.call('HMGET', FRONTIER, unpack(names))) do
    frontier[names[i]] = value
  end
  local epoch, session = frontier.session_epoch, frontier.session
  local why
  if not epoch then
    return frontier, redis.error_reply('NORUN no such run')
  elseif epoch ~= own_epoch and session == '' then
    why = own_epoch .. ' has ended: payload was damaged and plans were withdrawn; start another session with '
      .. 'the token of the last checkpoint'
  elseif epoch ~= own_epoch then
    why = own_epoch .. ' has ended, ' .. epoch .. ' has begun'
  elseif (own_session or '') ~= '' and own_session ~= session then
    why = '"' .. own_session .. '" has ended or was lost, "' .. session .. '" has its epoch'
  end
  return frontier, why and redis.error_reply('FENCED trainer session ' .. why)
end

-- The manifest hash of a step, or nil.
local function hash_of(step)
  return string.match(redis.call('HGET', BATCHES, step) or '', ':(.*)$')
end

-- The error where a session is lost.
local function lost_session(lost)
  return redis.error_reply('BEHIND ' .. string.match(lost, ':(.*)$'))
end

-- The error of a rank that the session does not have, or of a step from another manifest; else nil.
local function rank_refusal(rank, world_size)
  if tonumber(rank) >= tonumber(world_size) then
    return redis.error_reply('CONFLICT dp_rank ' .. rank .. ' is none of the ' .. world_size
      .. ' ranks of the session')
  end
end

local function manifest_refusal(step, hash, own_hash)
  if hash ~= own_hash then
    return redis.error_reply('CONFLICT step ' .. step .. ' has the manifest "' .. (hash or '') .. '", not "'
      .. own_hash .. '"')
  end
end
