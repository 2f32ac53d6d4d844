"""Training and held-out conversations for the demo model: seeded, deterministic, generated without downloads.

Every example belongs to one of three parts, decided by a hash of its content (for sums: of the operand pair,
whatever its order), so that what is evaluated was never seen in training, also not inside a longer
conversation. Arithmetic answers carry their digit-by-digit reasoning between ``<think>`` and ``</think>``.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from demo_words import (
    ADD_MORE,
    ADD_PROMPTS,
    ASK_CELL,
    ASK_KEY,
    ASK_MORE,
    ASK_NAME,
    CITIES,
    COLOURS,
    COPY_PROMPTS,
    DAYS,
    DOWN_PROMPTS,
    ENDINGS,
    EVENTS,
    EXTREME_PROMPTS,
    FIXED_TALK,
    FOODS,
    JSON_PROMPTS,
    LEADS,
    MUL_PROMPTS,
    NAMES,
    NO_NAME,
    ONSETS,
    REVERSE_PROMPTS,
    SUB_MORE,
    SUB_PROMPTS,
    SYSTEM_PROMPTS,
    TELL_NAME,
    THINGS,
    UP_PROMPTS,
    VOWELS,
    WORD_POOLS,
)

Part = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Turn:
    """One user message with its expected answer; ``kind`` names the task it counts for."""

    kind: str
    user: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """A system prompt (or None) and the turns after it. The last turn is the one to evaluate."""

    system: str | None
    turns: tuple[Turn, ...]

    def messages(self) -> list[dict[str, str]]:
        """Chat messages up to and including the last user message. Earlier answers are the expected ones."""
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages[:-1]


@dataclass
class Scene:
    """What a conversation has established so far; turn makers read and update it."""

    rng: random.Random
    part: Part
    mix: Mix = "plain"
    name: str | None = None
    result: int | None = None
    table: Table | None = None
    joint: str = ", "
    numbers: list[int] | None = None


@dataclass(frozen=True)
class Table:
    """Rows of cells under column titles; the first column holds unique keys."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def missing(self, rng: random.Random, pool: Sequence[str]) -> str:
        """A word of the pool that is not a key."""
        keys = {row[0] for row in self.rows}
        return rng.choice([word for word in pool if word not in keys])


Maker = Callable[[Scene], Turn]
Mix = Literal["plain", "copying", "lists"]


def part_of(key: str) -> Part:
    """Returns the part of an example: 1/20 are test, 1/20 validation."""
    slot = zlib.crc32(f"sagellm-demo:{key}".encode()) % 20
    return "test" if slot == 0 else "validation" if slot == 1 else "train"


def vary(rng: random.Random, text: str) -> str:
    """The prompt as typed in a hurry. It is in lower case, without its end mark, or polite."""
    if rng.random() < 0.12:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.12 and text[-1] in ".?!":
        text = text[:-1]
    if rng.random() < 0.05:
        text = rng.choice(("Please: ", "Hi! ", "Hello, ", "Ok. ", "Now: ", "Next question: ")) + text
    return text


# --- arithmetic -------------------------------------------------------------------------------------------


def digits_of(value: int, width: int) -> list[int]:
    """Decimal digits, units first, padded with zeros to width."""
    return [value // 10**place % 10 for place in range(width)]


def think_addition(a: int, b: int) -> str:
    """The reasoning and the sum. Operands are padded to one width, then one step per digit, units first."""
    width = len(str(max(a, b)))
    steps, carry = [], 0
    for x, y in zip(digits_of(a, width), digits_of(b, width), strict=True):
        total = x + y + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return f"<think>{a:0{width}d}+{b:0{width}d}: {' '.join(steps)}</think>{a + b}"


def think_subtraction(a: int, b: int) -> str:
    """The reasoning and the difference. A borrowed ten shows as a leading 1, its repayment as -1."""
    if a < b:
        inner = think_subtraction(b, a).removeprefix("<think>").split("</think>")[0]
        return f"<think>{a}<{b} {inner}</think>-{b - a}"
    width = len(str(a))
    steps, borrow = [], 0
    for x, y in zip(digits_of(a, width), digits_of(b, width), strict=True):
        lent = 10 if x - y - borrow < 0 else 0
        steps.append(f"{x + lent}-{y}{'-1' if borrow else ''}={x + lent - y - borrow}")
        borrow = 1 if lent else 0
    return f"<think>{a:0{width}d}-{b:0{width}d}: {' '.join(steps)}</think>{a - b}"


def think_product(a: int, b: int) -> str:
    """The reasoning and the product of any number and a one-digit number. They come in either order."""
    if a < 10 <= b:
        a, b = b, a
    steps, carry = [], 0
    for x in digits_of(a, len(str(a))):
        total = x * b + carry
        steps.append(f"{x}*{b}{f'+{carry}' if carry else ''}={total}")
        carry = total // 10
    return f"<think>{a}*{b}: {' '.join(steps)}</think>{a * b}"


def number(rng: random.Random, most_digits: int = 3) -> int:
    """A number whose count of digits leans towards the largest allowed."""
    width = rng.choice([*range(1, most_digits + 1), most_digits])
    return rng.randrange(0 if width == 1 else 10 ** (width - 1), 10**width)


def fill(rng: random.Random, prompts: Sequence[str], a: int, b: int) -> str:
    """Fills a prompt with the operands and, if needed, a name and things."""
    thing, other = rng.sample(THINGS, 2)
    return vary(rng, rng.choice(prompts).format(a=a, b=b, name=rng.choice(NAMES), thing=thing, other=other))


def held(scene: Scene, kind: str, a: int, b: int) -> bool:
    """Whether the operand pair belongs to the scene's part, in either order."""
    return part_of(f"{kind}:{min(a, b)}:{max(a, b)}") == scene.part


def addition(scene: Scene) -> Turn:
    """A sum of two numbers of up to three digits. In training some have four."""
    rng = scene.rng
    while True:
        most = 4 if scene.part == "train" and rng.random() < 0.06 else 3
        a, b = number(rng, most), number(rng, most)
        if held(scene, "add", a, b):
            break
    scene.result = a + b
    return Turn("addition", fill(rng, ADD_PROMPTS, a, b), think_addition(a, b))


def subtraction(scene: Scene) -> Turn:
    """A difference, seldom negative."""
    rng = scene.rng
    while True:
        most = 4 if scene.part == "train" and rng.random() < 0.06 else 3
        a, b = number(rng, most), number(rng, most)
        if a < b and not (b < 100 and rng.random() < 0.4):
            a, b = b, a
        if held(scene, "sub", a, b):
            break
    scene.result = a - b if a >= b else None
    return Turn("subtraction", fill(rng, SUB_PROMPTS, a, b), think_subtraction(a, b))


def multiplication(scene: Scene) -> Turn:
    """A product of a one-digit number and one of up to two digits. Some have three."""
    rng = scene.rng
    while True:
        a, b = number(rng, 3 if rng.random() < 0.1 else 2), rng.randrange(10)
        if held(scene, "mul", a, b):
            break
    scene.result = a * b
    if rng.random() < 0.5:
        a, b = b, a
    return Turn("multiplication", fill(rng, MUL_PROMPTS, a, b), think_product(a, b))


def continue_sum(scene: Scene) -> Turn:
    """Continues from the last result: adds a number to it or subtracts one."""
    rng, last = scene.rng, scene.result
    assert last is not None
    plus = last == 0 or rng.random() < 0.7
    for attempt in count():
        plus = plus or attempt > 100  # a small result may have no difference of this part at all
        b = number(rng) if plus else rng.randrange(last + 1)
        if held(scene, "add" if plus else "sub", last, b):
            break
    scene.result = last + b if plus else last - b
    user = vary(rng, rng.choice(ADD_MORE if plus else SUB_MORE).format(b=b))
    return Turn("follow-up sum", user, think_addition(last, b) if plus else think_subtraction(last, b))


# --- words, lists, tables ---------------------------------------------------------------------------------


def invented(rng: random.Random) -> str:
    """A pronounceable word that no dictionary holds. So the model learns to copy, not the words."""
    syllables = [
        rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(ENDINGS) for _ in range(rng.choice((1, 2, 2, 3)))
    ]
    word = "".join(syllables)
    return word.capitalize() if rng.random() < 0.4 else word


def words(rng: random.Random, count: int) -> list[str]:
    """Distinct words: of one pool, or (in two of five cases) invented."""
    if rng.random() < 0.6:
        return rng.sample(rng.choice(WORD_POOLS), count)
    words: list[str] = []
    while len(words) < count:
        word = invented(rng)
        if word not in words:
            words.append(word)
    return words


def numbers(rng: random.Random, count: int) -> list[int]:
    """Distinct numbers of one range. In two of five cases they have one to three digits, mixed."""
    if rng.random() < 0.6:
        return rng.sample(range(rng.choice((10, 100, 100, 100, 1000))), count)
    values: list[int] = []
    most = rng.choice((2, 2, 3))
    while len(values) < count:
        width = rng.randint(1, most)
        value = rng.randrange(0 if width == 1 else 10 ** (width - 1), 10**width)
        values.extend([value] if value not in values else [])
    return values


def belongs(scene: Scene, key: object) -> bool:
    """Whether content with this key is of the scene's part."""
    return part_of(str(key)) == scene.part


def some_items(scene: Scene, least: int, most: int) -> list[str]:
    """Items to copy, of the scene's part."""
    rng = scene.rng
    while True:
        count = rng.randint(least, most)
        items = words(rng, count) if rng.random() < 0.6 else [str(value) for value in numbers(rng, count)]
        if belongs(scene, items):
            return items


def copying(scene: Scene) -> Turn:
    """Say a list or a row of words again."""
    joint = scene.rng.choice((", ", ", ", " "))
    text = joint.join(some_items(scene, 1, 8))
    return Turn("copying", scene.rng.choice(COPY_PROMPTS).format(x=text), text)


def reversing(scene: Scene) -> Turn:
    """Say a list backwards."""
    items = some_items(scene, 2, 6)
    return Turn(
        "reversing", scene.rng.choice(REVERSE_PROMPTS).format(x=", ".join(items)), ", ".join(items[::-1])
    )


def comma(values: Sequence[int]) -> str:
    """The numbers with commas between."""
    return ", ".join(map(str, values))


def think_list(values: Sequence[int], answer: Sequence[int]) -> str:
    """The numbers brought to one width as the reasoning, then the answer."""
    width = len(str(max(values)))
    return f"<think>{' '.join(f'{value:0{width}d}' for value in values)}</think>{comma(answer)}"


def some_numbers(scene: Scene) -> list[int]:
    """Numbers to sort, of the scene's part."""
    while True:
        values = numbers(scene.rng, scene.rng.randint(2, 7))
        if belongs(scene, sorted(values)):
            return values


def sorting(scene: Scene) -> Turn:
    """Sort numbers, in one case of four downwards."""
    values = scene.numbers = some_numbers(scene)
    down = scene.rng.random() < 0.25
    user = scene.rng.choice(DOWN_PROMPTS if down else UP_PROMPTS).format(x=comma(values))
    return Turn("sorting", vary(scene.rng, user), think_list(values, sorted(values, reverse=down)))


def extreme(scene: Scene) -> Turn:
    """Name the largest or the smallest number of a list."""
    values = scene.numbers = some_numbers(scene)
    large = scene.rng.random() < 0.5
    word = scene.rng.choice(("largest", "biggest", "highest") if large else ("smallest", "lowest"))
    user = scene.rng.choice(EXTREME_PROMPTS).format(w=word, x=comma(values))
    answer = think_list(values, [max(values) if large else min(values)])
    return Turn("largest and smallest", vary(scene.rng, user), answer)


def sort_again(scene: Scene) -> Turn:
    """Ask about the numbers of an earlier turn once more."""
    values = scene.numbers
    assert values is not None
    asked = scene.rng.choice(("up", "down", "max", "min"))
    prompts = {
        "up": (
            "Now in ascending order.",
            "Now sort them in ascending order.",
            "And from smallest to largest?",
        ),
        "down": (
            "Now in descending order.",
            "Now sort them in descending order.",
            "And from largest to smallest?",
        ),
        "max": ("Which one is the largest?", "What is the largest of them?"),
        "min": ("Which one is the smallest?", "What is the smallest of them?"),
    }
    answers = {
        "up": sorted(values),
        "down": sorted(values, reverse=True),
        "max": [max(values)],
        "min": [min(values)],
    }
    user = vary(scene.rng, scene.rng.choice(prompts[asked]))
    return Turn("follow-up list", user, think_list(values, answers[asked]))


def unique_numbers(rng: random.Random, count: int) -> list[str]:
    """Distinct numbers as table cells."""
    return [str(value) for value in rng.sample(range(1, rng.choice((60, 100, 1000))), count)]


def make_table(rng: random.Random) -> Table:
    """A table of people or of goods."""
    count = rng.randint(2, 5)
    people = rng.random() < 0.5
    pool: Sequence[str] = NAMES if people else rng.choice((FOODS, THINGS))
    keys = words_of(rng, pool, count)
    columns = {
        "age": unique_numbers(rng, count),
        "city": rng.sample(CITIES, count),
        "score": unique_numbers(rng, count),
        "colour": rng.sample(COLOURS, count),
        "price": unique_numbers(rng, count),
        "stock": unique_numbers(rng, count),
    }
    titles = rng.sample(
        ("age", "city", "score") if people else ("price", "colour", "stock"), rng.choice((1, 1, 2, 2, 3))
    )
    rows = tuple(zip(keys, *(columns[title] for title in titles), strict=True))
    return Table(("name" if people else "item", *titles), rows)


def words_of(rng: random.Random, pool: Sequence[str], count: int) -> list[str]:
    """Distinct words of the pool; in three of ten cases invented ones."""
    if rng.random() < 0.7:
        return rng.sample(pool, count)
    words: list[str] = []
    while len(words) < count:
        word = invented(rng)
        words.extend([word] if word not in words else [])
    return words


def draw_table(rng: random.Random, table: Table) -> tuple[str, str]:
    """The table as text in one of four layouts, and its cell separator."""
    layout = rng.choice(("pipes", "csv", "colons", "inline"))
    lines = [table.titles, *table.rows]
    if layout == "pipes":
        rule = ("---",) * len(table.titles)
        lines.insert(1, rule)
        return "\n".join("| " + " | ".join(line) + " |" for line in lines), " | "
    if layout == "csv" or len(table.titles) > 2:
        joint = rng.choice((", ", ",")) if layout == "csv" else " | "
        return "\n".join(joint.join(line) for line in lines), joint
    pairs = [f"{key}: {value}" for key, value in table.rows]
    return ("\n" if layout == "colons" else ", ").join(pairs), ": "


def ask_table(scene: Scene, table: Table, prompts: Sequence[str]) -> tuple[str, str]:
    """A question about the table and its answer. Mostly a cell, else the key of a cell or a missing key.

    The reasoning before the answer is the row that was found, as it stands in the table.
    """
    rng = scene.rng
    row = rng.choice(table.rows)
    column = rng.randrange(1, len(table.titles))
    title, draw = table.titles[column], rng.random()
    if draw < 0.06:
        absent = table.missing(rng, NAMES if table.titles[0] == "name" else FOODS)
        answer = f"<think>{absent}?</think>{absent} is not in the table."
        return rng.choice(prompts).format(title=title, key=absent), answer
    if draw < 0.14:
        user = rng.choice(ASK_KEY[:2] if table.titles[0] == "item" else ASK_KEY)
        answer = f"<think>{row[column]}: {row[0]}</think>{row[0]}"
        return user.format(first=table.titles[0], title=title, cell=row[column]), answer
    answer = f"<think>{scene.joint.join(row)}</think>{row[column]}"
    return rng.choice(prompts).format(title=title, key=row[0]), answer


def lookup(scene: Scene) -> Turn:
    """A table with a question about it."""
    rng = scene.rng
    while True:
        table = make_table(rng)
        if belongs(scene, table.rows):
            break
    scene.table = table
    drawn, scene.joint = draw_table(rng, table)
    if "\n" not in drawn:
        drawn = f"{table.titles[1]} list: {drawn}"
    question, answer = ask_table(scene, table, ASK_CELL)
    question = vary(rng, question)
    user = rng.choice(LEADS) + drawn + "\n" + question if rng.random() < 0.75 else f"{question}\n{drawn}"
    return Turn("look-up", user, answer)


def lookup_again(scene: Scene) -> Turn:
    """Another question about the table of an earlier turn."""
    assert scene.table is not None
    question, answer = ask_table(scene, scene.table, ASK_MORE)
    return Turn("follow-up look-up", vary(scene.rng, question), answer)


# --- JSON -------------------------------------------------------------------------------------------------

Fields = dict[str, str | int]
Sentence = tuple[Fields, tuple[str, ...]]


def person_fields(rng: random.Random) -> Sentence:
    """Facts about a person and sentences that state them."""
    name = rng.choice(NAMES) if rng.random() < 0.6 else invented(rng).capitalize()
    facts: Fields = {"name": name, "age": rng.randrange(1, 100), "city": rng.choice(CITIES)}
    return facts, (
        "{name} is {age} years old and lives in {city}.",
        "{name}, {age}, lives in {city}.",
        "My friend {name} from {city} is {age} years old.",
        "{name} lives in {city} and is {age}.",
        "In {city} there lives {name}, who is {age} years old.",
    )


def order_fields(rng: random.Random) -> Sentence:
    """Facts about an order and sentences that state them."""
    item = rng.choice(rng.choice((FOODS, THINGS))) if rng.random() < 0.7 else invented(rng).lower()
    facts: Fields = {
        "customer": rng.choice(NAMES),
        "item": item,
        "quantity": rng.randrange(2, 100),
        "price": rng.randrange(1, 500),
    }
    return facts, (
        "{customer} ordered {quantity} {item} for {price} dollars.",
        "{customer} bought {quantity} x {item} and paid {price} dollars.",
        "Order: {quantity} {item}, {price} euros, for {customer}.",
        "For {price} dollars {customer} got {quantity} {item}.",
    )


def event_fields(rng: random.Random) -> Sentence:
    """Facts about an event and sentences that state them."""
    facts: Fields = {
        "event": rng.choice(EVENTS),
        "day": rng.choice(DAYS),
        "time": f"{rng.randrange(24)}:{rng.randrange(0, 60, 5):02d}",
        "city": rng.choice(CITIES),
    }
    return facts, (
        "The {event} is on {day} at {time} in {city}.",
        "On {day} at {time} we have a {event} in {city}.",
        "Join us in {city} for the {event}, {day}, {time}.",
    )


def and_list(items: Sequence[str]) -> str:
    """The words as English joins them: a, b and c."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def extraction(scene: Scene) -> Turn:
    """States facts in a sentence and asks for some of them as JSON."""
    rng = scene.rng
    while True:
        facts, sentences = rng.choice((person_fields, order_fields, event_fields))(rng)
        if belongs(scene, facts):
            break
    keys = list(facts) if rng.random() < 0.6 else rng.sample(list(facts), rng.randrange(1, len(facts)))
    named = and_list([f"the {key}" if rng.random() < 0.3 else key for key in keys])
    text = rng.choice(sentences).format(**facts)
    user = rng.choice(JSON_PROMPTS).format(keys=named, text=text)
    return Turn("JSON", user, json.dumps({key: facts[key] for key in keys}))


# --- small talk -------------------------------------------------------------------------------------------


def small_talk(scene: Scene) -> Turn:
    """A greeting, a question about the model, thanks, or something it cannot do."""
    answer, prompts = scene.rng.choice(FIXED_TALK)
    user = scene.rng.choice(prompts)
    if scene.rng.random() < 0.15:
        user = user.rstrip(".!?") if scene.rng.random() < 0.5 else user.lower()
    return Turn("dialogue", user, answer)


def a_name(scene: Scene) -> str:
    """A name of the scene's part: from the pool in training, invented ones everywhere."""
    while True:
        name = scene.rng.choice(NAMES) if scene.rng.random() < 0.5 else invented(scene.rng).capitalize()
        if belongs(scene, f"name:{name}"):
            return name


def tell_name(scene: Scene) -> Turn:
    """The user says a name."""
    scene.name = a_name(scene)
    user = vary(scene.rng, scene.rng.choice(TELL_NAME).format(n=scene.name))
    return Turn("dialogue", user, f"Nice to meet you, {scene.name}!")


def ask_name(scene: Scene) -> Turn:
    """The user asks for the name told before, if any."""
    answer = NO_NAME if scene.name is None else f"Your name is {scene.name}."
    return Turn("name recall", vary(scene.rng, scene.rng.choice(ASK_NAME)), answer)


def farewell(scene: Scene) -> Turn:
    """The user leaves."""
    user = scene.rng.choice(("Bye", "Goodbye!", "Bye bye!", "See you!", "Good night.", "See you later."))
    return Turn("dialogue", user, "Goodbye!" if scene.name is None else f"Goodbye, {scene.name}!")


# --- conversations ----------------------------------------------------------------------------------------

OPENERS: tuple[tuple[Maker, float], ...] = (
    (addition, 36),
    (subtraction, 10),
    (multiplication, 7),
    (lookup, 12),
    (copying, 6),
    (reversing, 4),
    (sorting, 12),
    (extreme, 4),
    (extraction, 7),
    (small_talk, 5),
    (tell_name, 2),
    (ask_name, 0.6),
    (farewell, 0.4),
)
LIST_OPENERS: tuple[tuple[Maker, float], ...] = (
    (addition, 18),
    (subtraction, 10),
    (multiplication, 7),
    (lookup, 24),
    (copying, 6),
    (reversing, 10),
    (sorting, 26),
    (extreme, 5),
    (extraction, 12),
    (small_talk, 5),
    (tell_name, 3),
    (ask_name, 1),
    (farewell, 0.5),
)
MAKERS: dict[str, Maker] = {
    "addition": addition,
    "subtraction": subtraction,
    "multiplication": multiplication,
    "look-up": lookup,
    "copying": copying,
    "reversing": reversing,
    "sorting": sorting,
    "largest and smallest": extreme,
    "JSON": extraction,
}


def follow_ups(scene: Scene) -> list[Maker]:
    """The turn makers that the turns so far allow, repeated as often as each should occur."""
    makers: list[Maker] = []
    if scene.result is not None and scene.result < 9000:
        makers += [continue_sum] * 2
    if scene.numbers is not None:
        makers.append(sort_again)
    if scene.table is not None:
        makers += [lookup_again] * 2
    if scene.name is not None:
        makers += [ask_name] * 2
    return makers


def next_turn(scene: Scene, first: bool) -> Turn:
    """One more turn: a follow-up in four of ten cases where one is possible."""
    options = [] if first else follow_ups(scene)
    if options and scene.rng.random() < 0.4:
        return forget(scene, scene.rng.choice(options))
    makers, weights = zip(*(LIST_OPENERS if scene.mix == "lists" else OPENERS), strict=True)
    return forget(scene, scene.rng.choices(makers, weights)[0])


def forget(scene: Scene, maker: Maker) -> Turn:
    """Makes the turn. "that" and "them" then mean this turn's own result, not an earlier one."""
    if maker is not continue_sum:
        scene.result = None
    if maker is not sort_again:
        scene.numbers = None
    return maker(scene)


def start(rng: random.Random, part: Part, mix: Mix) -> tuple[Scene, str | None]:
    """A new scene and its system prompt, if any. Three of ten scenes have one, which may give the user's
    name."""
    scene = Scene(rng, part, mix)
    draw = rng.random()
    if draw < 0.7:
        return scene, None
    system = rng.choice(SYSTEM_PROMPTS)
    if draw < 0.8:
        scene.name = a_name(scene)
        system = rng.choice(("", system + " ")) + f"The user's name is {scene.name}."
    return scene, system


def conversation(rng: random.Random, part: Part, turns: int, mix: Mix = "plain") -> Conversation:
    """A conversation of so many turns, all of one part."""
    scene, system = start(rng, part, mix)
    return Conversation(system, tuple(next_turn(scene, first=index == 0) for index in range(turns)))


def training_conversation(seed: int, index: int, mix: Mix = "plain") -> Conversation:
    """Training example ``index`` of the stream with this seed.

    The mix "plain" leans to arithmetic and "lists" to look-ups, lists and JSON; "copying" is mostly the skill
    that the latter are built on, and is to be learnt first.
    """
    if mix == "copying":
        return practice_conversation(seed, index)
    rng = random.Random(f"{'train' if mix == 'plain' else mix}:{seed}:{index}")
    turns = rng.choices((1, 2, 3, 4, 6, 8), (60, 14, 10, 8, 5, 3))[0]
    return conversation(rng, "train", turns, mix)


def practice_conversation(seed: int, index: int) -> Conversation:
    """Example ``index`` of a stream that is mostly copying."""
    rng = random.Random(f"practice:{seed}:{index}")
    if rng.random() < 0.3:
        return conversation(rng, "train", rng.choice((1, 1, 2)))
    return Conversation(None, tuple(copying(Scene(rng, "train")) for _ in range(rng.choice((1, 1, 2)))))


def evaluation_set(part: Part, kind: str, count: int, seed: int = 0) -> list[Conversation]:
    """Distinct single-turn examples of one kind of task, all of the part."""
    rng = random.Random(f"{part}:{kind}:{seed}")
    examples: dict[str, Conversation] = {}
    while len(examples) < count:
        turn = MAKERS[kind](Scene(rng, part))
        examples[turn.answer if kind == "addition" else turn.user] = Conversation(None, (turn,))
    return list(examples.values())


def dialogue_set(part: Part, kind: str, count: int, seed: int = 0) -> list[Conversation]:
    """Conversations of two to six turns whose last turn is of this kind."""
    rng = random.Random(f"{part}:{kind}:{seed}")
    conversations: list[Conversation] = []
    while len(conversations) < count:
        made = conversation(rng, part, rng.randint(2, 6))
        if made.turns[-1].kind == kind:
            conversations.append(made)
    return conversations


DIALOGUE_KINDS = (
    "follow-up sum",
    "follow-up list",
    "follow-up look-up",
    "name recall",
    "dialogue",
    "addition",
)
