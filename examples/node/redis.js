// A minimal Redis client: one connection, one command at a time, RESP2. In production use the `redis` package from npm:
//
//   const client = await createClient({ url, RESP: 2 }).connect();
//   const withBuffers = client.withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer });
//   const redis = {
//     command: (...words) => client.sendCommand(words.map(String)),
//     bytes: (...words) => withBuffers.sendCommand(words.map(String)),
//   };

import net from "node:net";

export class Redis {
  #socket;
  #received = Buffer.alloc(0);
  #arrived = () => {};
  #failure = null;

  /** redis://user:password@host:port/db, or unix:///path/to/socket */
  static async connect(url) {
    const { protocol, hostname, port, pathname, username, password } = new URL(url);
    const place = protocol === "unix:" ? { path: pathname } : { host: hostname, port: Number(port || 6379) };
    const redis = new Redis();
    redis.#socket = net.connect(place);
    await new Promise((resolve, reject) => redis.#socket.once("connect", resolve).once("error", reject));
    redis.#socket.on("data", (chunk) => {
      redis.#received = Buffer.concat([redis.#received, chunk]);
      redis.#arrived();
    });
    for (const event of ["error", "close"]) {
      redis.#socket.on(event, (error) => {
        redis.#failure = error || new Error("the server has closed the connection");
        redis.#arrived();
      });
    }
    const login = [username, password].filter(Boolean).map(decodeURIComponent);
    if (login.length) await redis.command("AUTH", ...login);
    if (protocol !== "unix:" && pathname.length > 1) await redis.command("SELECT", pathname.slice(1));
    return redis;
  }

  /** The reply to one command, its strings as text; throws what the server answers with an error. */
  async command(...words) {
    return asText(await this.bytes(...words));
  }

  /** The same with the strings as bytes. */
  async bytes(...words) {
    const parts = words.map((word) => Buffer.from(String(word)));
    const bulk = parts.flatMap((part) => [Buffer.from(`$${part.length}\r\n`), part, Buffer.from("\r\n")]);
    this.#socket.write(Buffer.concat([Buffer.from(`*${parts.length}\r\n`), ...bulk]));
    const reply = await this.#read();
    if (reply instanceof Error) throw reply;
    return reply;
  }

  close() {
    this.#socket.removeAllListeners("close").end();
  }

  async #read() {
    const line = (await this.#take(this.#lineEnd.bind(this))).toString();
    const [kind, rest] = [line[0], line.slice(1)];
    if (kind === "+") return rest;
    if (kind === "-") return new Error(rest);
    if (kind === ":") return Number(rest);
    if (Number(rest) < 0) return null;
    if (kind === "$") {
      const length = Number(rest);
      return this.#take(() => (this.#received.length >= length + 2 ? length : -1));
    }
    const items = [];
    for (let i = 0; i < Number(rest); i++) items.push(await this.#read());
    return items;
  }

  #lineEnd() {
    return this.#received.indexOf("\r\n");
  }

  async #take(length) {
    while (length() < 0) {
      if (this.#failure) throw this.#failure;
      await new Promise((resolve) => (this.#arrived = resolve));
    }
    const end = length();
    const taken = this.#received.subarray(0, end);
    this.#received = this.#received.subarray(end + 2);
    return taken;
  }
}

export function asText(reply) {
  if (Array.isArray(reply)) return reply.map(asText);
  return Buffer.isBuffer(reply) ? reply.toString() : reply;
}
