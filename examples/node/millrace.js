// A Millrace client in Node, written from docs/protocol.md: submit, stream, wait, cancel.

import { createHash, randomBytes, randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { asText } from "./redis.js";

const TERMINAL = new Set(["finished", "failed", "cancelled", "expired"]);
const BLOCK_MS = 5000;
const WATCH_EVERY_MS = 10_000;
const LUA = fileURLToPath(new URL("../../results/lua", import.meta.url));
const FLOAT_FIELDS = new Set([
  ...["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"],
  ...["delay_s", "run_at", "deadline_s"],
]);

export class Millrace {
  #redis;
  #prefix;
  #lua;
  #shas = new Map();

  /** `redis` has the methods of redis.js; `lua` is the folder with the scripts, by default that of the checkout. */
  constructor(redis, { queue = "default", lua = LUA } = {}) {
    this.#redis = redis;
    this.#prefix = `millrace:{${queue}}:`;
    this.#lua = lua;
  }

  /** Queues a request, an object as in docs/protocol.md, and returns its id. The same request again is the same job. */
  async submit(fields) {
    const { id = randomUUID(), ...request } = given(fields);
    const body = canonical(request);
    const digest = createHash("sha256").update(body).digest("hex");
    const { tenant = "default", priority = 0, stream = false } = request;
    const isDrawn = (request.seed ?? -1) === -1;
    const seed = isDrawn ? randomBytes(8).readBigUInt64LE() >> 1n : request.seed;
    const job = [id, digest, body, cost(request), seed, tenant, priority, stream ? "1" : "", options(request)];
    const [outcome] = await this.#run("submit", ...job);
    if (outcome === "conflict") throw new Error(`the id ${id} belongs to another job`);
    if (outcome.startsWith("full")) throw new Error(`the queue is full: ${outcome}`);
    // The rest says why no job can be so: "invalid <field>", or "oversized <limit> <value>".
    if (!["created", "exists"].includes(outcome)) throw new Error(`the job was refused: ${outcome}`);
    return id;
  }

  /**
   * Yields {id, index, offset, tokens, text, content, reasoning, tool_calls, logprobs} as they come, and last {id, state,
   * reason, usage, error} and what else EndEvent in millrace.d.ts has. `index` is the candidate. To go on after an event give
   * its id as `after`. Where the stream has lost that place, the first event has `restart`, and all follows from the beginning.
   */
  async *stream(id, after = "0-0") {
    const connection = await this.#redis.duplicate(); // it blocks, so no other call shares it
    try {
      yield* this.#follow(connection, id, after);
    } finally {
      connection.close();
    }
  }

  async *#follow(connection, id, after) {
    let position = after === "0-0" ? 0 : NaN; // tokens read so far, of all candidates; NaN: not known
    let read = after === "0-0" ? [] : null; // by candidate, what was read so far; null: not known
    let watch = await this.#watch(id);
    while (true) {
      if (Date.now() >= watch.again) watch = await this.#watch(id);
      const entries = await this.#entries(connection, id, after, !watch.hasEnded);
      if (!entries.length && watch.hasEnded) {
        await this.#watch(id); // throws when all have expired meanwhile; else `after` was the last one
        return;
      }
      if (entries.length && isNaN(position)) {
        // Their position has nothing to be compared with. Ask what is trimmed by now, after they were read.
        const { trimmedId } = await this.#watch(id);
        position = isLater(trimmedId, after) ? -1 : positionOf(entries[0]);
      }
      for (const entry of entries) {
        if (positionOf(entry) > position) {
          const lost = await this.#trimmed(id, after, read);
          yield* lost.events;
          ({ position, read, last: after } = lost);
          break; // and read on from there
        }
        const event = toEvent(entry);
        yield event;
        if (event.state) return;
        after = event.id;
        position = positionOf(entry) + event.tokens.length;
        if (read) read[event.index] = counted(read[event.index], event);
      }
    }
  }

  /** The job when it has ended: its last event, with `outputs`, those of the candidates, and the `text` of the first one. */
  async wait(id) {
    const found = [[]]; // the events of each candidate
    for await (const event of this.stream(id)) {
      if (!event.state) (found[event.index] ??= []).push(event);
      else {
        const outputs = Array.from(found, (events) => joined(events ?? []));
        return { ...event, text: outputs[0].text, outputs };
      }
    }
  }

  /** The job's state now; null when it is not known. */
  state(id) {
    return this.#redis.command("HGET", `${this.#prefix}job:${id}`, "state");
  }

  /** "cancelled", "cancelling", the state that it had ended in, or null when it is not known. */
  cancel(id) {
    return this.#run("cancel", id);
  }

  /** Has the engine show the job's output for the next 30 s, and says how its stream is. */
  async #watch(id) {
    const answer = await this.#run("watch", id, 30_000);
    if (answer === null) throw new Error(`no job ${id}`);
    const [state, , trimmedId, hasStream] = answer;
    if (!hasStream) throw new Error(`the result of job ${id} has expired`);
    return { hasEnded: hasEnded(state), trimmedId, again: Date.now() + WATCH_EVERY_MS };
  }

  async #entries(connection, id, after, isWaiting) {
    const block = isWaiting ? ["BLOCK", BLOCK_MS] : [];
    const key = `${this.#prefix}result:${id}`;
    const found = await connection.command("XREAD", "COUNT", 100, ...block, "STREAMS", key, after);
    return (found?.[0][1] ?? []).map(([at, flat]) => ({ id: at, ...fields(flat) }));
  }

  /** What a long stream has lost at its beginning, beyond what was `read` of each candidate, as events. */
  async #trimmed(id, after, read) {
    const [last, ...trimmed] = await this.#runForBytes("trimmed", id);
    if (!last.length) throw new Error(`the stream of job ${id} has lost entries`);
    const outputs = trimmed.map(([text, packed, , chat]) => {
      const lines = chat.length ? `${chat}`.trimEnd().split("\n") : [""];
      const tokens = Array.from({ length: packed.length / 4 }, (_, i) => packed.readUInt32LE(4 * i)); // ids of 4 bytes
      return { ...joined(lines.map((line) => partsOf(line, `${text}`))), tokens, text: `${text}` };
    });
    const events = outputs.flatMap((output, index) => {
      const event = { id: after, index, offset: read?.[index]?.tokens ?? 0, ...behind(output, read?.[index]) };
      return event.tokens.length ? [event] : [];
    });
    if (events.length) events.at(-1).id = `${last}`; // who stops before lacks the rest
    if (events.length && !read) events[0].restart = true;
    const found = outputs.map((output) => counted(null, output));
    return { events, read: found, last: `${last}`, position: found.reduce((sum, { tokens }) => sum + tokens, 0) };
  }

  async #run(script, ...args) {
    return asText(await this.#runForBytes(script, ...args));
  }

  async #runForBytes(script, ...args) {
    const load = () => this.#redis.command("SCRIPT", "LOAD", this.#source(script));
    if (!this.#shas.has(script)) this.#shas.set(script, await load());
    const call = () => this.#redis.bytes("EVALSHA", this.#shas.get(script), 1, this.#prefix, ...args);
    try {
      return await call();
    } catch (error) {
      if (!error.message.startsWith("NOSCRIPT")) throw error;
      await load();
      return await call();
    }
  }

  /** The text of a script with the modules in place of the lines that include them, each once; an indented line's in its block. */
  #source(name, seen = new Set()) {
    const text = readFileSync(`${this.#lua}/${name}.lua`, "utf8");
    return text.replace(/^( *)-- include: (.+)\n/gm, (_, indent, modules) => {
      const known = indent ? new Set(seen) : seen;
      return modules.split(" ").map((one) => (known.has(one) ? "" : this.#source(`lib/${one}`, known.add(one)))).join("");
    });
  }
}

export const hasEnded = (state) => TERMINAL.has(state);

/** What an event adds to the parts of an output. Without the field `chat` its text is content. */
function partsOf(chat, text) {
  return { content: null, reasoning: null, tool_calls: [], ...(chat ? JSON.parse(chat) : { content: text }) };
}

const OUTPUT = ["tokens", "text", "content", "reasoning", "tool_calls"];
const ofOutput = (valueOf) => Object.fromEntries(OUTPUT.map((name) => [name, valueOf(name)]));
const orNull = (value, name) => (name === "content" || name === "reasoning" ? value || null : value);

/** The output that these events make. */
function joined(events) {
  const isList = { tokens: true, tool_calls: true };
  const values = (name) => events.map((event) => event[name] ?? "");
  return ofOutput((name) => orNull(isList[name] ? values(name).flat() : values(name).join(""), name));
}

/** How much was read, with one more event. */
const counted = (known, event) => ofOutput((name) => (known?.[name] ?? 0) + (event[name]?.length ?? 0));

/** The rest of an output behind what was read of it. */
const behind = (whole, known) => ofOutput((name) => orNull(whole[name]?.slice(known?.[name] ?? 0), name));

function toEvent({ id, index = 0, offset, tokens, text, chat, logprobs, state, ...end }) {
  const parsed = (json) => json && JSON.parse(json);
  if (!state) {
    const output = { tokens: JSON.parse(tokens), text, ...partsOf(chat, text), logprobs: parsed(logprobs) };
    return { id, index: Number(index), offset: Number(offset), ...output };
  }
  const { reason, reasons, prompt_tokens, completion_tokens, cached_tokens } = end;
  const counts = Object.entries({ prompt_tokens, completion_tokens, cached_tokens });
  const usage = prompt_tokens && Object.fromEntries(counts.map(([name, count]) => [name, Number(count)]));
  const [first_token_ms, error] = [end.first_token, end.error].map(parsed);
  const prompt_logprobs = parsed(end.prompt_logprobs);
  return { id, state, reason, reasons: reasons?.split(" "), usage, first_token_ms, error, prompt_logprobs };
}

/** The tokens of all candidates in the events before an entry. */
const positionOf = ({ position, offset }) => Number(position ?? offset);

/** Compares the ids of two entries; "" comes before all. */
function isLater(id, other) {
  const [[ms, number = 0], [otherMs, otherNumber = 0]] = [id, other].map((one) => one.split("-").map(Number));
  return ms > otherMs || (ms === otherMs && number > otherNumber);
}

/** Without the fields that are null, which means not given. A `max_tokens` of null stays: up to the end of the context. */
function given(fields) {
  return Object.fromEntries(Object.entries(fields).filter(([name, value]) => value !== null || name === "max_tokens"));
}

/** The canonical body. Leave out what has its default, and the digest is that of every other client. */
function canonical(request) {
  const fields = withForm(request);
  if (typeof fields.stop === "string") fields.stop = [fields.stop];
  return sortedJson(fields);
}

/** Compact JSON with sorted names, but for messages and tools. `field` is the field of the request that the value belongs to. */
function sortedJson(value, field) {
  if (field === "messages" || field === "tools") return JSON.stringify(value);
  if (FLOAT_FIELDS.has(field) && Number.isInteger(value)) return value.toFixed(1);
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map((item) => sortedJson(item, field) ?? "null").join()}]`;
  // JSON.stringify of a sorted object would not do: an object has names such as "10" before all others.
  const names = Object.keys(value).filter((name) => value[name] !== undefined);
  names.sort((one, other) => Buffer.compare(Buffer.from(one), Buffer.from(other)));
  return `{${names.map((name) => `${JSON.stringify(name)}:${sortedJson(value[name], field ?? name)}`).join()}}`;
}

/** The request with `response_format` as `structured_outputs`, and with schemas as text, since the order of their keys matters. */
function withForm(request) {
  const { response_format, structured_outputs, ...others } = request;
  const format = response_format?.type === "text" ? undefined : response_format;
  const form = format ? fromResponseFormat(format) : structured_outputs;
  if (format && (!form || structured_outputs)) return { ...request }; // the engine refuses it, and says why
  if (!form) return others;
  const { json, structural_tag, ...rest } = given(form);
  return { ...others, structured_outputs: { ...rest, json: compact(json), structural_tag: compact(structural_tag) } };
}

function fromResponseFormat({ type, ...format }) {
  const given_as = "response_format";
  const json = format.json_schema?.schema ?? null;
  if (type === "json_object") return { json_object: true, given_as };
  if (type === "json_schema" && json !== null) return { json, given_as };
  if (type === "structural_tag") return { structural_tag: format, given_as };
}

/** Compact JSON of a schema, or of its JSON text, with the keys in their order. */
function compact(schema) {
  if (typeof schema !== "string") return JSON.stringify(schema);
  JSON.parse(schema); // throws if it is not JSON
  const write = (part) => (part[0] === '"' ? JSON.stringify(JSON.parse(part)) : "");
  return schema.replace(/"[^"\\]*(?:\\.[^"\\]*)*"|\s+/g, write);
}

function cost({ prompt, prompt_token_ids, messages, tools, max_tokens = 16, n = 1 }) {
  const text = prompt ?? JSON.stringify(messages ?? "") + (tools?.length ? JSON.stringify(tools) : "");
  const promptCost = prompt_token_ids?.length ?? Math.ceil(Buffer.byteLength(text, "utf8") / 4);
  return promptCost + (max_tokens ?? 1024) * n;
}

function options({ delay_s, run_at, deadline_s, max_retries, meta, n = 1 }) {
  const ms = (seconds) => (seconds == null ? undefined : Math.ceil(seconds * 1000));
  const given = { delay_ms: ms(delay_s), run_at_ms: ms(run_at), deadline_ms: ms(deadline_s), max_retries };
  if (n > 1) given.n = n;
  if (meta != null) given.meta = JSON.stringify(meta);
  const text = JSON.stringify(given);
  return text === "{}" ? "" : text;
}

function fields(flat) {
  return Object.fromEntries(Array.from({ length: flat.length / 2 }, (_, i) => [flat[2 * i], flat[2 * i + 1]]));
}
