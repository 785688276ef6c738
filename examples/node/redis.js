// A minimal Redis client: pipelined commands on one connection, RESP2. In production use the `redis` package from npm:
//
//   const client = await createClient({ url, RESP: 2 }).connect();
//   const adapt = (client) => {
//     const withBuffers = client.withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer });
//     return {
//       command: (...words) => client.sendCommand(words.map(String)),
//       bytes: (...words) => withBuffers.sendCommand(words.map(String)),
//       duplicate: async () => adapt(await client.duplicate().connect()),
//       close: () => client.close(),
//     };
//   };

import net from "node:net";
import tls from "node:tls";

const { MILLRACE_REDIS_URL, REDIS_URL } = process.env;
const CONNECT_LIMIT_MS = 3000;

export class Redis {
  #url;
  #socket;
  #received = Buffer.alloc(0);
  #waiting = []; // of each command without a reply, in order: {resolve, reject}
  #failure = null;

  /**
   * `url`: redis://user:password@host:port/db, rediss:// for TLS, or unix:///path/to/socket. The database may also be
   * given as ?db=N, which takes precedence. Without a URL, the first of MILLRACE_REDIS_URL, REDIS_URL and
   * redis://localhost:6379. NODE_EXTRA_CA_CERTS names certificates that Node shall trust.
   */
  static async connect(url = MILLRACE_REDIS_URL || REDIS_URL || "redis://localhost:6379") {
    const redis = new Redis();
    redis.#url = url;
    await redis.#open();
    return redis;
  }

  /** Another connection to the same server: a command that blocks delays those after it on its connection. */
  duplicate() {
    return Redis.connect(this.#url);
  }

  /** The reply to one command, its strings as text; throws what the server answers with an error. */
  async command(...words) {
    return asText(await this.bytes(...words));
  }

  /** The same with the strings as bytes. Commands may be sent before the replies to earlier ones have come. */
  bytes(...words) {
    const parts = words.map((word) => Buffer.from(String(word)));
    const bulk = parts.flatMap((part) => [Buffer.from(`$${part.length}\r\n`), part, Buffer.from("\r\n")]);
    return new Promise((resolve, reject) => {
      if (this.#failure) return reject(this.#failure);
      this.#waiting.push({ resolve, reject });
      this.#socket.write(Buffer.concat([Buffer.from(`*${parts.length}\r\n`), ...bulk]));
    });
  }

  close() {
    this.#socket.removeAllListeners("close").end();
  }

  async #open() {
    const { place, isTls, login, database } = parseUrl(this.#url);
    const socket = (this.#socket = isTls ? tls.connect(place) : net.connect(place));
    await new Promise((resolve, reject) => {
      const refuse = (error) => reject(error || new Error("the server has closed the connection"));
      socket.once(isTls ? "secureConnect" : "connect", resolve).once("error", refuse).once("close", refuse);
      socket.setTimeout(CONNECT_LIMIT_MS, () => refuse(new Error(`no ${isTls ? "TLS" : "TCP"} connection within 3 s`)));
    }).catch((error) => {
      socket.destroy();
      throw error;
    });
    socket.setTimeout(0);
    socket.on("data", (chunk) => this.#receive(chunk));
    for (const event of ["error", "close"]) {
      socket.on(event, (error) => this.#fail(error || new Error("the server has closed the connection")));
    }
    if (login.length) await this.command("AUTH", ...login);
    if (database) await this.command("SELECT", database);
  }

  #receive(chunk) {
    this.#received = Buffer.concat([this.#received, chunk]);
    let parsed;
    while ((parsed = parse(this.#received, 0))) {
      const [reply, end] = parsed;
      this.#received = this.#received.subarray(end);
      const { resolve, reject } = this.#waiting.shift();
      reply instanceof Error ? reject(reply) : resolve(reply);
    }
  }

  #fail(error) {
    this.#failure ??= error;
    for (const { reject } of this.#waiting.splice(0)) reject(this.#failure);
  }
}

/** Where to connect to, and the login and the database. Throws for what it does not understand. */
function parseUrl(url) {
  const { protocol, hostname, port, pathname, username, password, searchParams } = URL.canParse(url) ? new URL(url) : {};
  const [isUnix, isTls] = [protocol === "unix:", protocol === "rediss:"];
  const path = isUnix ? "" : (pathname ?? "").slice(1);
  const wrong = [...(searchParams ?? [])].find(([name, value]) => name !== "db" || !/^\d+$/.test(value));
  if (!["redis:", "rediss:", "unix:"].includes(protocol) || !/^\d*$/.test(path) || wrong) {
    const shown = url.replace(/^(\w+:\/\/)?.*@/, "$1").replace(/\?.*/, ""); // without passwords
    const forms = "redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH";
    const hint = wrong ? `: its parameter ${wrong[0]} is refused, only db=NUMBER may be given` : "";
    throw new Error(`the URL must be ${forms}, got ${shown}${hint}`);
  }
  const place = isUnix ? { path: pathname } : { host: hostname, port: Number(port || 6379) };
  if (isTls && !net.isIP(hostname)) place.servername = hostname;
  const login = [username, password].filter(Boolean).map(decodeURIComponent);
  return { place, isTls, login, database: searchParams.get("db") ?? path };
}

/** The reply that begins at `start`, and where it ends; null while it is not complete. */
function parse(buffer, start) {
  const lineEnd = buffer.indexOf("\r\n", start);
  if (lineEnd < 0) return null;
  const line = buffer.toString("utf8", start, lineEnd);
  const [kind, rest, next] = [line[0], line.slice(1), lineEnd + 2];
  if (kind === "+") return [rest, next];
  if (kind === "-") return [new Error(rest), next];
  if (kind === ":") return [Number(rest), next];
  const length = Number(rest);
  if (length < 0) return [null, next];
  const stringEnd = next + length;
  if (kind === "$") return buffer.length < stringEnd + 2 ? null : [buffer.subarray(next, stringEnd), stringEnd + 2];
  const items = [];
  let end = next;
  for (let i = 0; i < length; i++) {
    const item = parse(buffer, end);
    if (!item) return null;
    items.push(item[0]);
    end = item[1];
  }
  return [items, end];
}

export function asText(reply) {
  if (Array.isArray(reply)) return reply.map(asText);
  return Buffer.isBuffer(reply) ? reply.toString() : reply;
}
