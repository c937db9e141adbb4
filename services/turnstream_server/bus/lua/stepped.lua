#!lua flags=allow-oom
-- Acknowledges that the optimizer has taken the last update of a step.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash    read: session_epoch, lineage; changed: stepped
--   KEYS[2] batches   hash    read: step -> "<trajectories planned up to it>:<manifest hash>"
--   KEYS[3] wake      stream  added, so that whoever waits for capacity is told
-- Arguments: ARGV[1] session epoch    ARGV[2] step    ARGV[3] manifest hash
--            ARGV[4] session name, or "": a store that lost a session may give its epoch to another
-- Reply:     the run's lineage, for the recovery token; the same again for an earlier step
-- Errors:
--   NORUN     no such run
--   FENCED    another trainer session has begun
--   BEHIND    this store has no such batch: it was lost
--   CONFLICT  not the next step, or trained from another manifest

local epoch, stepped, lineage, session, planned = unpack(
  redis.call('HMGET', KEYS[1], 'session_epoch', 'stepped', 'lineage', 'session', 'planned'))
if not epoch then
  return redis.error_reply('NORUN no such run')
end
if epoch ~= ARGV[1] then
  return redis.error_reply('FENCED trainer session ' .. ARGV[1] .. ' is over, ' .. epoch
    .. ' has begun')
end
if (ARGV[4] or '') ~= '' and ARGV[4] ~= session then
  return redis.error_reply('FENCED trainer session "' .. ARGV[4] .. '" is over or was lost, "'
    .. session .. '" has its epoch')
end
local step = tonumber(ARGV[2])
if step > tonumber(planned or 0) then
  return redis.error_reply('BEHIND step ' .. step .. ' was trained from the manifest "' .. ARGV[3]
    .. '", but the newest batch of this store is ' .. (planned or 0))
end
if step > stepped + 1 then
  return redis.error_reply('CONFLICT step ' .. step .. ' does not follow step ' .. stepped)
end
local hash = string.match(redis.call('HGET', KEYS[2], ARGV[2]) or '', ':(.*)$')
if hash ~= ARGV[3] then
  return redis.error_reply('CONFLICT step ' .. step .. ' has the manifest "' .. (hash or '')
    .. '", not "' .. ARGV[3] .. '"')
end
if step == stepped + 1 then
  redis.call('HSET', KEYS[1], 'stepped', step)
  redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'w', '')
end
return lineage
