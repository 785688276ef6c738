// node examples/node/generate.js '3 + 4 =' [redis URL] [queue]     prints the answer while it is generated
// Without a URL: that of MILLRACE_REDIS_URL, of REDIS_URL, or redis://localhost:6379.

import { Millrace } from "./millrace.js";
import { Redis } from "./redis.js";

const [prompt = "3 + 4 =", url, queue = "default"] = process.argv.slice(2);

process.on("uncaughtException", (error) => {
  console.error(error.message || error.code); // a connection that fails on two addresses has no message
  process.exit(1);
});

const redis = await Redis.connect(url);
const millrace = new Millrace(redis, { queue });
const id = await millrace.submit({ prompt, max_tokens: 32, stream: true, meta: { from: "node" } });
console.error(`job ${id}`);
for await (const event of millrace.stream(id)) {
  if (!event.state) process.stdout.write(event.text);
  else {
    console.error(`\n${event.state}${event.error ? `: ${event.error.message}` : ""}`);
    process.exitCode = event.state === "finished" ? 0 : 1;
  }
}
redis.close();
