#!lua
-- Part of stepped, committed, record_rank and announce_version: checks that a call is of the
-- present trainer session.
--
-- Defines refused(epoch, session, own_epoch, own_session): the error, or nil. The first two are of
-- the frontier, the others of the call. A call of an older release has no session name, or "".
-- Withdrawn plans end the session: then its name in the frontier is "".
--
-- Defines hash_of(step): the manifest hash of a step, or nil. BATCHES is the key.

local function refused(epoch, session, own_epoch, own_session)
  if not epoch then
    return redis.error_reply('NORUN no such run')
  end
  if epoch ~= own_epoch and session == '' then
    return redis.error_reply('FENCED trainer session ' .. own_epoch .. ' has ended: payload was damaged '
      .. 'and plans were withdrawn; start another session with the token of the last checkpoint')
  end
  if epoch ~= own_epoch then
    return redis.error_reply('FENCED trainer session ' .. own_epoch .. ' has ended, ' .. epoch
      .. ' has begun')
  end
  if (own_session or '') ~= '' and own_session ~= session then
    return redis.error_reply('FENCED trainer session "' .. own_session .. '" has ended or was lost, "'
      .. session .. '" has its epoch')
  end
end

local function hash_of(step)
  return string.match(redis.call('HGET', BATCHES, step) or '', ':(.*)$')
end
