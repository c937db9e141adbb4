#!lua flags=allow-oom
-- Part of post_reward, fold_batch and fold_ended: keeps rewards of trajectories that are not in the
-- ledger for a while, because a post whose reply was lost is repeated.
--
-- Needs REWARDS   a key, hash  read; removed: the oldest of those that are only remembered
--       REWARDED  a key, zset  added: trajectory ids, by when they were remembered; the oldest go
-- Needs read_sliced and write_sliced of slices.lua.
-- Gives remember_rewards(ids), of ids that are in REWARDS, and forget_rewards(ids), of ids that
--       leave the ledger, rewarded or not.

local MOST_REWARDED = 4096

local function remember_rewards(ids)
  local time = redis.call('TIME')
  local now_ms = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
  local members = {}
  for _, id in ipairs(ids) do
    members[#members + 1] = now_ms
    members[#members + 1] = id
  end
  write_sliced('ZADD', REWARDED, members)
  local surplus = redis.call('ZCARD', REWARDED) - MOST_REWARDED
  if surplus > 0 then
    local oldest = redis.call('ZRANGE', REWARDED, 0, surplus - 1)
    write_sliced('ZREM', REWARDED, oldest)
    write_sliced('HDEL', REWARDS, oldest)
  end
end

local function forget_rewards(ids)
  local rewarded = {}
  for i, known in ipairs(read_sliced('HMGET', REWARDS, ids)) do
    if known then
      rewarded[#rewarded + 1] = ids[i]
    end
  end
  if #rewarded > 0 then
    remember_rewards(rewarded)
  end
end
