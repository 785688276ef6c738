import type { Connection } from "./millrace.js";

export class Redis implements Connection {
  static connect(url?: string): Promise<Redis>;
  command(...words: unknown[]): Promise<any>;
  bytes(...words: unknown[]): Promise<any>;
  duplicate(): Promise<Redis>;
  close(): void;
}

export function asText(reply: unknown): any;
