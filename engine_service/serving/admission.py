"""Make the generations of a request, one for each candidate, after the checks that need the model."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Sequence as SequenceOf

import msgspec

from millrace.engine_service.chat.grammars import argument_schemas, must_constrain_tools
from millrace.engine_service.chat.outputs import ChatOutputs, ChatReader
from millrace.engine_service.chat.renderer import NotQuick, Renderer
from millrace.engine_service.chat.template import Chat, ChatTemplate, TextError
from millrace.engine_service.core.sequence import Sequence, StopRules
from millrace.engine_service.generation import Generation, TextRules
from millrace.engine_service.grammars import Grammars
from millrace.engine_service.text import Tokenizer
from millrace.executor.wire.messages import (
    MAX_RECORD_BYTES,
    LogitsSettings,
    ModelFacts,
    RowSampling,
    SeqId,
    ThinkingLimit,
    record_bytes,
)
from millrace.producer import GenerationRequest, InvalidRequest, SamplingParams, StructuredOutputs
from millrace.results.errors import shown

logger = logging.getLogger("millrace.engine")

_SEED_MASK = 2**64 - 1


class Admission:
    """Owns the rules of one loaded model: its vocabulary, its context, its tokenizer, its end tokens.

    Safe to use from several threads.
    """

    def __init__(
        self,
        facts: ModelFacts,
        tokenizer: Tokenizer | None,
        eos_token_ids: list[int],
        max_logprobs: int = 20,
        *,
        renderer: Renderer | None = None,
        chat_outputs: ChatOutputs | None = None,
    ) -> None:
        """`renderer`: for the prompts of chats; None: one of this process, without limits. `chat_outputs`: for the outputs;
        None: they are plain text."""
        self._facts = facts
        self._tokenizer = tokenizer
        self._chat_outputs = chat_outputs
        self._renderer = renderer or (Renderer(tokenizer.chat_template) if tokenizer else None)
        # Others cannot be sampled, and the worker cannot mask them for `min_tokens`. Some configurations name such.
        self._eos_token_ids = frozenset(each for each in eos_token_ids if 0 <= each < facts.vocab_size)
        most = facts.vocab_size if max_logprobs == -1 else max_logprobs
        self._max_logprobs = min(most, MAX_RECORD_BYTES // record_bytes(0) - 1)  # each record has to fit into a step
        if tokenizer is not None and tokenizer.num_tokens > facts.vocab_size:
            logger.warning(
                "the tokenizer has %d tokens and the model %d: prompts with the others are refused; use the model's own "
                "tokenizer, or resize the model's embeddings",
                *(tokenizer.num_tokens, facts.vocab_size),
            )
        self._grammars = None
        if tokenizer is not None and self._eos_token_ids:
            self._grammars = Grammars(tokenizer, facts.vocab_size, sorted(self._eos_token_ids))
        self._is_quick = False
        self._seq_ids = itertools.count(1)

    def close(self) -> None:
        """End the process that checks grammars."""
        if self._grammars is not None:
            self._grammars.close()

    def with_template(self, source: str) -> Admission:
        """Return the same admission with another chat template, which is valid."""
        changed = copy.copy(self)
        if self._renderer is not None:
            variables = self._renderer.template.variables
            changed._renderer = Renderer(ChatTemplate({"default": source}, variables))
        return changed

    def quick(self) -> Admission:
        """Return an admission that raises `NotQuick` for what takes longer than a claim may: a slow chat, or a grammar that
        is to be checked first. Otherwise it is the same."""
        changed = copy.copy(self)
        changed._is_quick = True
        return changed

    def prompt_text(self, request: GenerationRequest) -> str | None:
        """Return the text of the prompt: the template's, for messages. None: the request has token ids. Raises as
        `prompt_token_ids`."""
        if request.prompt_token_ids is not None:
            return None
        if self._tokenizer is None:
            field = "messages" if request.prompt is None else "prompt"
            raise InvalidRequest(field, "the engine's model has no tokenizer; send prompt_token_ids")
        return request.prompt or self._render(request)

    def prompt_token_ids(
        self,
        request: GenerationRequest,
        truncate_to: int | None = None,
        *,
        text: str | None = None,
    ) -> list[int]:
        """Return the ids of the prompt, prompt_token_ids or messages of the request: the last `truncate_to`, as in
        `SamplingParams.truncate_prompt_tokens`. `text`: its `prompt_text`, if that is known.

        Raises `InvalidRequest`, also when they do not fit into the context.
        """
        num_kept = self._num_kept(truncate_to)
        if request.prompt_token_ids is None:
            text = self.prompt_text(request) if text is None else text
            return self._encode(text or "", num_kept, is_chat=request.prompt is None)
        token_ids = request.prompt_token_ids[-(num_kept or 0) :]
        self._check_fits("prompt_token_ids", len(token_ids))
        self._check_vocabulary("prompt_token_ids", token_ids)
        return token_ids

    def chat_reader(self, request: GenerationRequest, prompt_token_ids: list[int]) -> ChatReader | None:
        """Return what reads the outputs of a chat; None for plain text."""
        return None if self._chat_outputs is None else self._chat_outputs.reader(request, prompt_token_ids)

    def with_form(
        self, sampling: SamplingParams, request: GenerationRequest, prompt_token_ids: list[int]
    ) -> SamplingParams:
        """Return the sampling parameters with the form of the output that a chat's tools and reasoning need.

        Raises `InvalidRequest` for tools that this model cannot be held to.
        """
        has_calls = must_constrain_tools(request)
        if self._chat_outputs is None:
            if has_calls:
                raise InvalidRequest("tools", "strict tools and a required call need a queue and `millrace serve`")
            return sampling
        form = self._chat_outputs.form(request, prompt_token_ids)
        wanted = sampling.structured_outputs
        if form is wanted:
            return sampling
        self._grammar(sampling)  # an error names the place in the caller's own form
        changed = msgspec.structs.replace(sampling, structured_outputs=form)
        try:
            self._grammar(changed, "strict tools" if request.tool_choice == "auto" else "tool_choice")
        except InvalidRequest as error:
            if form is None or error.field != form.field:
                raise
            if has_calls or wanted is None:
                raise InvalidRequest("tools", self._tool_error(request) or error.message) from error
            raise InvalidRequest(wanted.field, error.message) from error
        return changed

    def _tool_error(self, request: GenerationRequest) -> str:
        """Return the first tool whose calls cannot be held to its schema, and why; "" if each alone can."""
        for name, schema in argument_schemas(request).items():
            try:
                self._grammar(SamplingParams(structured_outputs=StructuredOutputs(json=schema)))
            except InvalidRequest as error:
                return f"the parameters of {name}: {error.message.removeprefix('json: ')}"
        return ""

    def admit(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        drawn_seed: int,
        outputs: SequenceOf[list[int]] = (),
        logprobs: SequenceOf[list[bytes]] = (),
        crash_count: int = 0,
        cache_salt: str | None = None,
        tenant: str = "",
        priority: int = 0,
    ) -> list[Generation]:
        """Return a generation for each candidate, ready for the engine.

        `drawn_seed` is used if the request has no seed. `outputs` and `logprobs` (the tokens of each candidate, and their
        JSON) and `crash_count` come from an earlier attempt.
        Only generations with the same `cache_salt` share cached blocks. `priority` is that of a job: lower numbers first.
        Raises `InvalidRequest` for what this model or its tokenizer cannot do, such as an id outside the vocabulary, and if
        too many log-probabilities are wanted.
        """
        self._check_vocabulary("stop_token_ids", sampling.stop_token_ids)
        eos_token_ids = frozenset[int]() if sampling.ignore_eos else self._eos_token_ids
        end_token_ids = frozenset(sampling.stop_token_ids) | eos_token_ids
        stop_rules = self._stop_rules(sampling, len(prompt_token_ids), end_token_ids)
        text_rules = self._text_rules(sampling, frozenset(sampling.stop_token_ids) - eos_token_ids)
        row_sampling = self._row_sampling(sampling, drawn_seed)

        def make(candidate: int, output: list[int], known: list[bytes]) -> Generation:
            only_first = {} if candidate == 0 else {"candidate": candidate, "prompt_logprobs": None}
            sequence = Sequence(
                SeqId(next(self._seq_ids)),
                prompt_token_ids,
                msgspec.structs.replace(row_sampling, **only_first) if only_first else row_sampling,
                stop_rules,
                output_token_ids=output,
                crash_count=crash_count,
                cache_salt=cache_salt or "",
                tenant=tenant,
                priority=-priority,
            )
            return Generation(sequence, text_rules, self._tokenizer, known)

        generations = []
        for candidate in range(sampling.n):
            output, known = outputs[candidate] if outputs else [], logprobs[candidate] if logprobs else []
            generation = make(candidate, output, known)
            if generation.finish_reason is not None and generation.sequence.must_score_prompt:
                # The prompt has to be computed again, and with it the last token.
                generation = make(candidate, output[:-1], known[:-1])
            generations.append(generation)
        return generations

    def _row_sampling(self, sampling: SamplingParams, drawn_seed: int) -> RowSampling:
        seed = drawn_seed if sampling.seed is None else sampling.seed
        # vLLM's rule: with ignore_eos too.
        held_token_ids = self._eos_token_ids.union(sampling.stop_token_ids) if sampling.min_tokens else frozenset[int]()
        return RowSampling(
            temperature=0.0 if sampling.is_greedy else sampling.temperature,
            top_k=max(0, sampling.top_k),
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=seed & _SEED_MASK,
            candidate=0,
            min_tokens=sampling.min_tokens,
            end_token_ids=sorted(held_token_ids),
            logprobs=self._num_logprobs("logprobs", sampling.logprobs),
            prompt_logprobs=self._num_logprobs("prompt_logprobs", sampling.prompt_logprobs),
            processors=self._logits_settings(sampling, held_token_ids),
            grammar=self._grammar(sampling),
        )

    def _num_logprobs(self, field: str, given: int | None) -> int | None:
        if field == "prompt_logprobs" and given is not None and not self._facts.scores_prompts:
            raise InvalidRequest(field, f"{self._facts.architecture} has none in this version; leave it out")
        count = self._facts.vocab_size if given == -1 else given
        if count is not None and count > self._max_logprobs:
            asked = "the whole vocabulary" if given == -1 else str(given)
            remedy = f"ask for less, or start the engine with max_logprobs {given}"
            raise InvalidRequest(
                field, f"asks for {asked}, but the engine gives at most {self._max_logprobs}; {remedy}"
            )
        return None if count is None else min(count, self._facts.vocab_size)

    def _num_kept(self, truncate_to: int | None) -> int | None:
        """Return how many tokens of the prompt are kept at most, None for all."""
        limit = self._facts.max_model_len - 1
        if truncate_to is not None and truncate_to > limit:
            rule = f"the context holds {limit} prompt tokens and an output token; give at most {limit}, or -1"
            raise InvalidRequest("truncate_prompt_tokens", f"is {truncate_to}, but {rule}")
        return limit if truncate_to == -1 else truncate_to

    def _encode(self, text: str, num_kept: int | None, *, is_chat: bool) -> list[int]:
        assert self._tokenizer is not None
        field = "messages" if is_chat else "prompt"
        token_ids = self._tokenizer.encode(text, add_special_tokens=not is_chat, num_kept=num_kept)
        if not token_ids:
            raise InvalidRequest(field, "is empty; give at least one token")
        self._check_fits(field, len(token_ids))
        if max(token_ids) >= self._facts.vocab_size:
            token_id = next(each for each in token_ids if each >= self._facts.vocab_size)
            token = self._tokenizer.decode([token_id], skip_special_tokens=False)
            rule = (
                f"is token {token_id} of the tokenizer, and the model has only {self._facts.vocab_size}; leave it out"
            )
            raise InvalidRequest(field, f"{shown(token)} {rule}")
        return token_ids

    def _render(self, request: GenerationRequest) -> str:
        assert self._renderer is not None
        chat = Chat(
            messages=request.messages or [],
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=request.chat_template_kwargs or {},
        )
        try:
            return self._renderer.render(chat, is_quick=self._is_quick)
        except TextError as error:
            raise InvalidRequest("messages", str(error)) from error

    def _stop_rules(self, sampling: SamplingParams, num_prompt_tokens: int, end_token_ids: frozenset[int]) -> StopRules:
        max_tokens = self._facts.max_model_len - num_prompt_tokens
        if sampling.max_tokens is not None:
            max_tokens = min(max_tokens, sampling.max_tokens)
        return StopRules(max_tokens=max_tokens, min_tokens=sampling.min_tokens, end_token_ids=end_token_ids)

    def _text_rules(self, sampling: SamplingParams, stop_token_ids: frozenset[int]) -> TextRules:
        if self._tokenizer is None and sampling.stop:
            raise InvalidRequest("stop", "the engine's model has no tokenizer; use stop_token_ids")
        return TextRules(
            stop=tuple(sampling.stop_strings),
            is_text_wanted=sampling.detokenize and self._tokenizer is not None,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            stop_token_ids=stop_token_ids,
            include_stop=sampling.include_stop_str_in_output,
        )

    # --- what changes the logits ---

    def _grammar(self, sampling: SamplingParams, cause: str | None = None) -> str:
        """`cause`: what the form was made for, if the caller has not given it."""
        wanted = sampling.structured_outputs
        if wanted is None:
            return ""
        if self._grammars is None:
            lacks = "tokenizer" if self._tokenizer is None else "token that ends a text"
            raise InvalidRequest(wanted.field, f"is not possible: the engine's model has no {lacks}")
        for field in ("ignore_eos", "min_tokens"):
            if getattr(sampling, field):
                rule = "a structured output ends where its form is complete; leave it out"
                raise InvalidRequest(field, f"cannot be given with {cause or wanted.field}: {rule}")
        if self._is_quick and not self._grammars.is_known(wanted):
            raise NotQuick(is_slow_template=False)
        return self._grammars.grammar(wanted)

    def _logits_settings(self, sampling: SamplingParams, held_token_ids: frozenset[int]) -> LogitsSettings | None:
        """Return None if nothing does."""
        bias = {int(token_id): value for token_id, value in (sampling.logit_bias or {}).items()}
        self._check_vocabulary("logit_bias", list(bias))
        self._check_vocabulary("allowed_token_ids", sampling.allowed_token_ids or ())
        settings = LogitsSettings(
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=bias,
            allowed_token_ids=sampling.allowed_token_ids,
            bad_words=self._bad_words(sampling.bad_words),
            thinking=self._thinking_limit(sampling.thinking_token_budget),
        )
        if sampling.allowed_token_ids is not None:
            excluded = held_token_ids.union(ids[0] for ids in settings.bad_words if len(ids) == 1)
            if excluded.issuperset(sampling.allowed_token_ids):
                raise InvalidRequest("allowed_token_ids", "leaves no token: min_tokens or bad_words exclude them all")
        return settings if settings != LogitsSettings() else None

    def _bad_words(self, words: list[str] | None) -> list[list[int]]:
        """Return the ids of the words at the beginning of a text, and within a text if they differ."""
        if not words:
            return []
        if self._tokenizer is None:
            raise InvalidRequest("bad_words", "the engine's model has no tokenizer; use logit_bias")
        found: list[list[int]] = []
        for word in words:
            first, within = (
                self._tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " ")
            )
            if not first:
                raise InvalidRequest("bad_words", f"{shown(word)} has no tokens; leave it out")
            found.append(first)
            # vLLM's rule: only if the space makes other tokens of the same number.
            if within and within[0] != first[0] and len(within) == len(first):
                found.append(within)
        for ids in found:
            self._check_vocabulary("bad_words", ids)
        return found

    def _thinking_limit(self, budget: int | None) -> ThinkingLimit | None:
        if budget is None:
            return None
        mark_ids = self._tokenizer.thinking_mark_ids if self._tokenizer is not None else None
        if mark_ids is None:
            rule = "the engine's model has no tokens that mark thinking, such as <think> and </think>; leave it out"
            raise InvalidRequest("thinking_token_budget", rule)
        self._check_vocabulary("thinking_token_budget", mark_ids)
        return ThinkingLimit(budget, *mark_ids)

    def _check_fits(self, field: str, num_tokens: int) -> None:
        limit = self._facts.max_model_len
        if num_tokens >= limit:
            rule = f"the context of {limit} must hold an output token too; shorten it"
            raise InvalidRequest(field, f"has {num_tokens} tokens, and {rule}")

    def _check_vocabulary(self, field: str, token_ids: SequenceOf[int]) -> None:
        size = self._facts.vocab_size
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < size):
            return
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise InvalidRequest(field, f"token id {token_id} is outside the vocabulary of {size}")
