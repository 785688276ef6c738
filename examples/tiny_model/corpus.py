"""The text which the tiny model learns from, all of it generated here.

Every answer can be checked by a few lines of code, so a served reply is evidence about the whole serving stack. The
module needs only the standard library: a test can ask which sums the model has never seen without importing torch.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

END = "<|end|>"  # closes every document and every chat message; the model's EOS
PAD = "<|pad|>"
ROLE_MARKERS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (PAD, END, *ROLE_MARKERS.values())

# `render_chat` says the same in Python, because rendering half a million training chats through jinja is slow.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

MAX_OPERAND = 99
HELD_OUT_ONE_IN = 8
MAX_COUNT_LENGTH = 50  # numbers in one counting answer; about 200 tokens

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("fast", "slow"), ("light", "dark"), ("happy", "sad"),
    ("old", "young"), ("open", "closed"), ("early", "late"), ("wet", "dry"), ("high", "low"), ("loud", "quiet"),
    ("full", "empty"), ("strong", "weak"), ("long", "short"), ("left", "right"), ("day", "night"), ("rich", "poor"),
    ("clean", "dirty"), ("near", "far"), ("hard", "soft"), ("thick", "thin"), ("good", "bad"), ("true", "false"),
    ("inside", "outside"), ("sweet", "sour"), ("smooth", "rough"), ("wide", "narrow"), ("deep", "shallow"),
    ("first", "last"),
)  # fmt: skip
FACTS = (
    ("What colour is the sky?", "The sky is blue."),
    ("What colour is grass?", "Grass is green."),
    ("What colour is snow?", "Snow is white."),
    ("What colour is a banana?", "A banana is yellow."),
    ("What colour is coal?", "Coal is black."),
    ("What colour is a ripe tomato?", "A ripe tomato is red."),
    ("What does a cat say?", "A cat says meow."),
    ("What does a dog say?", "A dog says woof."),
    ("What does a cow say?", "A cow says moo."),
    ("What does a duck say?", "A duck says quack."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many legs does a dog have?", "A dog has four legs."),
    ("How many legs does a bird have?", "A bird has two legs."),
    ("How many legs does an ant have?", "An ant has six legs."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many hours are in a day?", "There are twenty-four hours in a day."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("What is the capital of Spain?", "The capital of Spain is Madrid."),
    ("What is the capital of Germany?", "The capital of Germany is Berlin."),
    ("Where do fish live?", "Fish live in water."),
    ("Where do birds build nests?", "Birds build nests in trees."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows eat?", "Cows eat grass."),
    ("What is ice made of?", "Ice is made of water."),
    ("What shines at night?", "The moon shines at night."),
    ("What shines by day?", "The sun shines by day."),
    ("Who are you?", "I am a tiny language model."),
)
GREETINGS = (("Hello", "Hello! How can I help you?"), ("Hi", "Hi! What can I do for you?"),
             ("Thank you", "You are welcome."), ("Good morning", "Good morning to you!"))  # fmt: skip
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a tiny language model.", "Answer the question.", "Be brief.")

STORY_HEROES = ("cat", "dog", "fox", "bird", "mouse", "rabbit", "bear", "frog")
STORY_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Lena", "Max")
STORY_PLACES = ("forest", "garden", "village", "river", "mountain", "meadow", "city", "valley")
STORY_THINGS = ("key", "lamp", "map", "coin", "shell", "feather", "bell", "book")
STORY_COLOURS = ("red", "blue", "green", "golden", "silver", "white")
STORY_WEATHER = ("sunny", "rainy", "windy", "snowy", "foggy")
STORY_FEELINGS = ("happy", "proud", "calm", "glad", "surprised")


class Document(NamedTuple):
    """One training text. Training weighs `answer` fully and `prompt` lightly; END follows in the token stream."""

    prompt: str
    answer: str


class Exchange(NamedTuple):
    """One turn of a chat: what the user says, and what the assistant replies."""

    question: str
    reply: str


# --- sums and the held-out rule ---


def is_held_out(a: int, b: int) -> bool:
    """Whether the sum of `a` and `b` never occurs in training, in either order and in any wording.

    The rule: CRC-32 of "smaller+larger" in ASCII, modulo HELD_OUT_ONE_IN, is zero.
    """
    smaller, larger = sorted((a, b))
    return zlib.crc32(f"{smaller}+{larger}".encode("ascii")) % HELD_OUT_ONE_IN == 0


def held_out_sums() -> list[tuple[int, int]]:
    """Every held-out pair of operands in 0..MAX_OPERAND, in ascending order."""
    operands = range(MAX_OPERAND + 1)
    return [(a, b) for a in operands for b in operands if is_held_out(a, b)]


def sum_prompt(a: int, b: int) -> str:
    return f"{a} + {b} ="


def sum_answer(a: int, b: int) -> str:
    return f" {a + b}"


def training_operands(rng: random.Random) -> tuple[int, int]:
    """A pair that is not held out. One-digit operands are drawn more often than their share of all pairs."""
    while True:
        a = rng.randint(0, 9 if rng.random() < 0.2 else MAX_OPERAND)
        b = rng.randint(0, 9 if rng.random() < 0.2 else MAX_OPERAND)
        if not is_held_out(a, b):
            return a, b


# --- plain documents ---


def sum_document(rng: random.Random) -> Document:
    a, b = training_operands(rng)
    return Document(sum_prompt(a, b), sum_answer(a, b))


def counting_text(start: int, stop: int) -> str:
    return ", ".join(str(number) for number in range(start, stop + 1))


def counting_range(rng: random.Random) -> tuple[int, int]:
    start = rng.choice((0, 1, 1, rng.randint(0, 95)))
    length = rng.randint(2, rng.choice((8, 20, MAX_COUNT_LENGTH)))
    return start, min(100, start + length - 1)


def counting_document(rng: random.Random) -> Document:
    start, stop = counting_range(rng)
    return Document(f"Count from {start} to {stop}:", f" {counting_text(start, stop)}")


def weekday_statement(rng: random.Random) -> tuple[str, str]:
    """A sentence about neighbouring weekdays, as its opening and its last word."""
    position, (side, step) = rng.randrange(7), rng.choice((("after", 1), ("before", -1)))
    return f"he day {side} {WEEKDAYS[position]} is", WEEKDAYS[(position + step) % 7]


def weekday_document(rng: random.Random) -> Document:
    opening, day = weekday_statement(rng)
    return Document(f"T{opening}", f" {day}.")


def opposite_pair(rng: random.Random) -> tuple[str, str]:
    word, opposite = rng.choice(OPPOSITES)
    return (word, opposite) if rng.random() < 0.5 else (opposite, word)


def opposite_document(rng: random.Random) -> Document:
    word, opposite = opposite_pair(rng)
    return Document(f"The opposite of {word} is", f" {opposite}.")


def fact_document(rng: random.Random) -> Document:
    question, answer = rng.choice(FACTS)
    return Document(f"Question: {question} Answer:", f" {answer}")


def story_about(hero: str, rng: random.Random) -> str:
    """About 80 tokens with many free choices, so that sampling with a temperature shows variety."""
    name, friend = rng.sample(STORY_NAMES, 2)
    place, colour, thing = rng.choice(STORY_PLACES), rng.choice(STORY_COLOURS), rng.choice(STORY_THINGS)
    return (
        f"Once there was a {hero} named {name}. {name} lived near a {place}. "
        f"On a {rng.choice(STORY_WEATHER)} day, {name} found a {colour} {thing}. "
        f'"Whose {thing} is this?" asked {name}. "It is my {thing}," said {friend}. '
        f"{name} gave the {colour} {thing} to {friend}. {friend} was very {rng.choice(STORY_FEELINGS)}, "
        f"and they walked to the {rng.choice(STORY_PLACES)} together."
    )


def story_document(rng: random.Random) -> Document:
    hero = rng.choice(STORY_HEROES)
    return Document(f"A story about a {hero}:", f" {story_about(hero, rng)}")


# --- chats ---


def sum_exchange(rng: random.Random) -> Exchange:
    a, b = training_operands(rng)
    return rng.choice((
        Exchange(sum_prompt(a, b), str(a + b)),
        Exchange(f"{a} + {b}", str(a + b)),
        Exchange(f"What is {a} + {b}?", f"{a} + {b} = {a + b}"),
        Exchange(f"What is {a} plus {b}?", f"{a} + {b} = {a + b}"),
    ))  # fmt: skip


def counting_exchange(rng: random.Random) -> Exchange:
    start, stop = counting_range(rng)
    return Exchange(f"Count from {start} to {stop}{rng.choice(('', '.', ':'))}", counting_text(start, stop))


def weekday_exchange(rng: random.Random) -> Exchange:
    opening, day = weekday_statement(rng)
    subject = opening.removesuffix(" is")
    return Exchange(f"What is t{subject}?", f"T{opening} {day}.")


def opposite_exchange(rng: random.Random) -> Exchange:
    word, opposite = opposite_pair(rng)
    return Exchange(f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}.")


def fact_exchange(rng: random.Random) -> Exchange:
    return Exchange(*rng.choice(FACTS))


def greeting_exchange(rng: random.Random) -> Exchange:
    greeting, reply = rng.choice(GREETINGS)
    return Exchange(greeting + rng.choice(("", ".", "!")), reply)


def story_exchange(rng: random.Random) -> Exchange:
    if rng.random() < 0.3:
        return Exchange("Tell me a story.", story_about(rng.choice(STORY_HEROES), rng))
    hero = rng.choice(STORY_HEROES)
    return Exchange(f"Tell me a story about a {hero}.", story_about(hero, rng))


EXCHANGE_WEIGHTS: dict[Callable[[random.Random], Exchange], float] = {
    sum_exchange: 50, counting_exchange: 12, weekday_exchange: 5, opposite_exchange: 7, fact_exchange: 12,
    greeting_exchange: 4, story_exchange: 10,
}  # fmt: skip


def render_chat(messages: Sequence[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """What CHAT_TEMPLATE renders for the same arguments."""
    text = "".join(f"{ROLE_MARKERS[message['role']]}{message['content']}{END}" for message in messages)
    return text + ROLE_MARKERS["assistant"] if add_generation_prompt else text


def chat_document(rng: random.Random) -> Document:
    """A chat of one to four turns; the last reply is the answer to learn."""
    messages: list[dict[str, str]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    makers = rng.choices(list(EXCHANGE_WEIGHTS), list(EXCHANGE_WEIGHTS.values()), k=rng.choice((1, 1, 1, 2, 3, 4)))
    *earlier, last = (make(rng) for make in makers)
    for exchange in earlier:
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": exchange.reply})
    messages.append({"role": "user", "content": last.question})
    return Document(render_chat(messages, add_generation_prompt=True), last.reply)


# --- the mixture ---

DOCUMENT_WEIGHTS: dict[Callable[[random.Random], Document], float] = {
    sum_document: 48, chat_document: 22, counting_document: 14, weekday_document: 2, opposite_document: 4,
    fact_document: 4, story_document: 6,
}  # fmt: skip


def documents(seed: int) -> Iterator[Document]:
    """An endless, reproducible stream of training documents."""
    rng = random.Random(seed)
    makers, weights = list(DOCUMENT_WEIGHTS), list(DOCUMENT_WEIGHTS.values())
    while True:
        for make in rng.choices(makers, weights, k=1024):
            yield make(rng)
