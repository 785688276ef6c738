-- Checks of a new job. A client in any language may call `submit`, and a script's writes cannot be undone, so everything is
-- checked before the first write.
-- include: clock

local find = string.find
local NAME, DIGITS = '^[A-Za-z0-9._-]+$', '^-?%d+$'
local function is_name(text, max_bytes)
  return #text <= max_bytes and find(text, NAME) ~= nil
end

-- The first invalid argument of a job; nil where there is none. Numbers have to be plain digits, since other scripts read
-- them as integers. Jobs of one call often share tenant and priority, so the last valid ones are kept.
local MAX_COST_DIGITS = 12  -- the sum over a queue must stay within 64 bits
local valid_tenant, valid_priority
local function invalid_argument(id, cost, seed, tenant, priority)
  if not is_name(id, 128) then return 'id' end
  if #cost > MAX_COST_DIGITS or not find(cost, '^%d+$') then return 'cost' end
  if not find(seed, DIGITS) then return 'seed' end
  if #seed > 18 then  -- more than a Lua number holds, so digits are compared
    local largest = find(seed, '-', 1, true) and '-9223372036854775808' or '9223372036854775807'
    if #seed > #largest or #seed == #largest and seed > largest then return 'seed' end
  end
  if tenant ~= valid_tenant then
    if not is_name(tenant, 64) then return 'tenant' end
    valid_tenant = tenant
  end
  if priority ~= valid_priority then
    local number = find(priority, DIGITS) and tonumber(priority)
    if not number or number < -2147483648 or number > 2147483647 then return 'priority' end
    valid_priority = priority
  end
end

-- The options as a table, with `due`, when the job may begin; or nil, then the name of what is invalid. A null is an option
-- that is not given. All constants are inside, since most jobs have no options.
local NO_OPTIONS = {}
local function read_options(text)
  if text == '' then return NO_OPTIONS end
  local is_json, options = pcall(cjson.decode, text)
  if not is_json or type(options) ~= 'table' then return nil, 'options' end
  local ranges = {delay_ms = {0, 1e13}, run_at_ms = {0, 1e13}, deadline_ms = {1, 1e13}, max_retries = {0, 100}, n = {1, 64}}
  for name, value in pairs(options) do
    if not ranges[name] and name ~= 'meta' and name ~= 'batch' then  -- such as delay_s: the job must not begin at once
      return nil, type(name) == 'string' and is_name(name, 64) and name or 'options'
    end
    if value == cjson.null then options[name] = nil end
  end
  for name, range in pairs(ranges) do
    local value = options[name]
    local is_integer = type(value) == 'number' and value % 1 == 0
    if value ~= nil and not (is_integer and value >= range[1] and value <= range[2]) then return nil, name end
  end
  local meta, batch = options.meta, options.batch
  if meta ~= nil then
    local is_object = type(meta) == 'string' and #meta <= 16384 and find(meta, '^%s*{')
    if not (is_object and pcall(cjson.decode, meta)) then return nil, 'meta' end
  end
  if batch ~= nil and not (type(batch) == 'string' and is_name(batch, 64)) then return nil, 'batch' end
  options.due = options.run_at_ms or now + (options.delay_ms or 0)
  if options.deadline_ms and options.due >= now + options.deadline_ms then return nil, 'deadline_ms' end
  return options
end
