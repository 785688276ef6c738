// Types of millrace.js. docs/protocol.md describes the fields of a request.

export interface Connection {
  command(...words: unknown[]): Promise<any>;
  bytes(...words: unknown[]): Promise<any>;
  duplicate(): Promise<Connection>;
  close(): void;
}

export interface Message {
  role: string;
  content?: unknown;
  [name: string]: unknown;
}

export interface Tool {
  type: "function";
  function: { name: string; description?: string; parameters?: Record<string, unknown> };
}

/** Exactly one of `prompt`, `prompt_token_ids` and `messages`. Null stands for the default, except for `max_tokens`. */
export interface Request {
  id?: string;
  model?: string;
  prompt?: string;
  prompt_token_ids?: number[];
  messages?: Message[];
  tools?: Tool[];
  tool_choice?: "auto" | "none" | "required" | { type: "function"; function: { name: string } };
  parallel_tool_calls?: boolean;
  add_generation_prompt?: boolean;
  continue_final_message?: boolean;
  chat_template_kwargs?: Record<string, unknown>;
  max_tokens?: number | null;
  min_tokens?: number;
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  seed?: number | null;
  stop?: string | string[] | null;
  stop_token_ids?: number[];
  ignore_eos?: boolean;
  detokenize?: boolean;
  skip_special_tokens?: boolean;
  spaces_between_special_tokens?: boolean;
  include_stop_str_in_output?: boolean;
  truncate_prompt_tokens?: number | null;
  presence_penalty?: number;
  frequency_penalty?: number;
  repetition_penalty?: number;
  logit_bias?: Record<string, number> | null;
  allowed_token_ids?: number[] | null;
  bad_words?: string[] | null;
  thinking_token_budget?: number | null;
  n?: number;
  logprobs?: number | null;
  prompt_logprobs?: number | null;
  structured_outputs?: Record<string, unknown> | null;
  response_format?: Record<string, unknown> | null;
  tenant?: string;
  priority?: number;
  stream?: boolean;
  deadline_s?: number;
  delay_s?: number;
  run_at?: number;
  max_retries?: number;
  meta?: Record<string, unknown>;
  cache_salt?: string;
}

export type OrNull<T> = { [Name in keyof T]: T[Name] | null };

export type State = "delayed" | "queued" | "running" | EndState;
export type EndState = "finished" | "failed" | "cancelled" | "expired";

export interface JobError {
  kind: string;
  message: string;
  field?: string;
}

/** A token as [id, logprob, rank, text], then the most likely ones in its place. */
export type TokenLogprobs = [number, number, number, string | null][];

/** An output, or what an event adds to it. */
export interface Output {
  tokens: number[];
  text: string;
  /** The text without reasoning and tool calls; null if there is none. */
  content: string | null;
  reasoning: string | null;
  tool_calls: { index: number; id: string; type: "function"; function: { name: string; arguments: string } }[];
}

/** New output of one candidate. */
export interface OutputEvent extends Output {
  id: string;
  index: number;
  offset: number;
  /** One for each token, where they are wanted; what was trimmed before it was read has none. */
  logprobs?: TokenLogprobs[];
  restart?: true;
  state?: undefined;
}

/** The last event of a job. */
export interface EndEvent {
  id: string;
  state: EndState;
  reason: string;
  reasons?: string[];
  /** Where an engine ended the job. */
  usage?: { prompt_tokens: number; completion_tokens: number; cached_tokens: number };
  /** When the first token came, in ms since the epoch. */
  first_token_ms?: number;
  prompt_logprobs?: (TokenLogprobs | null)[];
  error?: JobError;
}

export interface EndedJob extends EndEvent {
  text: string;
  outputs: Output[];
}

export class Millrace {
  constructor(redis: Connection, options?: { queue?: string; lua?: string });
  submit(request: OrNull<Request>): Promise<string>;
  stream(id: string, after?: string): AsyncGenerator<OutputEvent | EndEvent, void, void>;
  wait(id: string): Promise<EndedJob>;
  state(id: string): Promise<State | null>;
  cancel(id: string): Promise<string | null>;
}

export function hasEnded(state: string): state is EndState;
