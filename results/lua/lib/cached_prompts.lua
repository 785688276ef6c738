-- Cached prompts: one of the next jobs of a tenant goes first if its prompt is cached and that of the first one is not. Part of
-- `claim`, whose variables and functions it uses.
-- include: settings record dequeue

-- The ranks of members whose prompt is cached, behind one whose prompt is not; and the number of those in front, whose prompts are
-- all cached. nil where no job can pass over another one.
local function find_cached(members, most)
  local sub, search, num_front, is_cached, last, is_found = string.sub, string.find, 0, nil, nil, nil
  for rank = 1, #members do
    local beginning = sub(members[rank], 18, 25)
    if beginning ~= last then last, is_found = beginning, search(cached, beginning, 1, true) end
    if is_found and num_front == rank - 1 then
      num_front = rank
      if rank == most then return nil end
    elseif is_found then
      is_cached = is_cached or {}
      is_cached[rank] = true
      if most == 1 then break end
    end
  end
  return is_cached, num_front
end

-- Returns a function that returns the rank of the job to take and the job: members[first], or one of the next ones. Only a
-- first job that the claim may take is passed over; it is added to `passed_over`.
local LOOKAHEAD, MAX_PASSED_OVER = 8, 16  -- jobs that are looked at; jobs that may pass over one first job
local function cached_first(tenant, members, is_cached, num_front, passed_over, most)
  local job, is_gone, priority, num_times = NOTHING, nil, nil, nil  -- the last first one
  local num_seen = num_front  -- members[num_seen] and those before it pass over no other job any more
  return function(first, num_passed)
    local id = id_of_member(members[first])
    if first <= num_front or is_cached[first] then return first, read_job(id, tenant) end
    if job.id ~= id then
      local f
      if num_passed < most - 1 then
        job = read_job(id, tenant)
        f = job.fields
        priority, num_times = f[9], f[11]
      else  -- the last job that the claim takes is another one
        f = record(id, 'cost', 'crashes', 'priority', 'passed_over')
        job = {id = id, cost = whole_number(f[1], 0), crashes = whole_number(f[2], 0)}
        priority, num_times = f[3], f[4]
      end
      is_gone, num_times = not (f[1] or f[3]), whole_number(num_times, 0)
    end
    for rank = math.max(first, num_seen) + 1, math.min(num_passed + LOOKAHEAD, #members) do
      if alone or is_gone or num_times >= MAX_PASSED_OVER or not may_take(job) then break end
      if is_cached[rank] then
        local other = read_job(id_of_member(members[rank]), tenant)
        if other.fields[9] ~= priority then break end
        if other.cost <= budget and not must_be_alone(other) then
          num_seen, num_times = rank, num_times + 1
          if not job.changes then passed_over[#passed_over + 1] = job end
          job.changes = {'passed_over', num_times}
          return rank, other
        end
      end
      num_seen = rank
    end
    return first, job.fields and job or read_job(id, tenant)
  end
end
