#!lua
-- Part of add_prompts, next_task and open_group: how many samples a group may have.
--
-- Gives why_too_many(num_samples, config), of the decoded config in force: a sentence for people, or
--       nil where the group may have so many.

local function why_too_many(num_samples, config)
  local most = config.max_samples
  if num_samples > most then
    return string.format('num_samples=%.0f is above max_samples=%.0f of the run: use fewer samples, '
      .. 'or revise max_samples', num_samples, most)
  end
end
