// A Millrace client in Node, written from docs/protocol.md: submit, stream, wait, cancel.

import { createHash, randomBytes, randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";

const TERMINAL = new Set(["finished", "failed", "cancelled", "expired"]);
const BLOCK_MS = 5000;
const WATCH_EVERY_MS = 10_000;

export class Millrace {
  #redis;
  #prefix;
  #lua;
  #shas = new Map();

  /** `lua` is the folder with the scripts, results/lua/. */
  constructor(redis, { queue = "default", lua }) {
    this.#redis = redis;
    this.#prefix = `millrace:{${queue}}:`;
    this.#lua = lua;
  }

  /** Queues a request, an object as in docs/protocol.md, and returns its id. The same request again is the same job. */
  async submit({ id = randomUUID(), ...request }) {
    const body = canonical(request);
    const digest = createHash("sha256").update(body).digest("hex");
    const { tenant = "default", priority = 0, stream = false } = request;
    const seed = request.seed ?? (randomBytes(8).readBigUInt64LE() >> 1n);
    const job = [id, digest, body, cost(request), seed, tenant, priority, stream ? "1" : "", options(request)];
    const [outcome] = await this.#run("submit", ...job);
    if (outcome === "conflict") throw new Error(`the id ${id} belongs to another job`);
    if (outcome.startsWith("full")) throw new Error(`the queue is full: ${outcome}`);
    if (outcome.startsWith("invalid")) throw new Error(`the job was refused: ${outcome}`); // and names the field
    return id;
  }

  /** Yields {offset, tokens, text} as they come, and last {state, reason, error}. `after` is the id of an event. */
  async *stream(id, after = "0-0") {
    let watchAgain = 0;
    while (true) {
      if (Date.now() >= watchAgain) {
        if ((await this.#run("watch", id, 30_000)) === null) throw new Error(`no job ${id}`);
        watchAgain = Date.now() + WATCH_EVERY_MS;
      }
      const key = `${this.#prefix}result:${id}`;
      const found = await this.#redis.command("XREAD", "COUNT", 100, "BLOCK", BLOCK_MS, "STREAMS", key, after);
      for (const [at, flat] of found?.[0][1] ?? []) {
        const entry = fields(flat);
        after = at;
        if (entry.state) {
          yield { id: at, state: entry.state, reason: entry.reason, error: entry.error && JSON.parse(entry.error) };
          return;
        }
        yield { id: at, offset: Number(entry.offset), tokens: JSON.parse(entry.tokens), text: entry.text };
      }
    }
  }

  /** The job when it has ended: {state, reason, error, text}. */
  async wait(id) {
    let text = "";
    for await (const event of this.stream(id)) {
      if (event.state) return { ...event, text };
      text += event.text;
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

  async #run(script, ...args) {
    const source = () => readFileSync(`${this.#lua}/_prelude.lua`, "utf8") + readFileSync(`${this.#lua}/${script}.lua`, "utf8");
    if (!this.#shas.has(script)) this.#shas.set(script, await this.#redis.command("SCRIPT", "LOAD", source()));
    const call = () => this.#redis.command("EVALSHA", this.#shas.get(script), 1, this.#prefix, ...args);
    try {
      return await call();
    } catch (error) {
      if (!error.message.startsWith("NOSCRIPT")) throw error;
      await this.#redis.command("SCRIPT", "LOAD", source());
      return await call();
    }
  }
}

export const hasEnded = (state) => TERMINAL.has(state);

/** Sorted keys, no white space. Leave out what has its default, and the digest is that of every other client. */
function canonical(request) {
  const sorted = (value) => {
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value)) return value.map(sorted);
    return Object.fromEntries(Object.keys(value).sort().map((key) => [key, sorted(value[key])]));
  };
  return JSON.stringify(sorted(request));
}

function cost({ prompt, prompt_token_ids, messages, max_tokens = 16 }) {
  const numBytes = (text) => Buffer.byteLength(text, "utf8");
  const promptCost = prompt_token_ids?.length ?? Math.ceil(numBytes(prompt ?? JSON.stringify(messages)) / 4);
  return promptCost + (max_tokens ?? 1024);
}

function options({ delay_s, run_at, deadline_s, max_retries, meta }) {
  const ms = (seconds) => (seconds === undefined ? undefined : Math.ceil(seconds * 1000));
  const given = { delay_ms: ms(delay_s), run_at_ms: ms(run_at), deadline_ms: ms(deadline_s), max_retries };
  if (meta !== undefined) given.meta = JSON.stringify(meta);
  const text = JSON.stringify(given);
  return text === "{}" ? "" : text;
}

function fields(flat) {
  return Object.fromEntries(Array.from({ length: flat.length / 2 }, (_, i) => [flat[2 * i], flat[2 * i + 1]]));
}
