"""The families of probes: scenarios in which a KV cache can go wrong.

Every scenario has a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from sagellm.diagnostics.verify.answers import Answer, compare
from sagellm.diagnostics.verify.discovery import LONG_ANSWER
from sagellm.diagnostics.verify.prober import NUM_GENERATED, Lane, Prober, Trial, all_of
from sagellm.diagnostics.verify.target import Prompt, Question

OFFSETS = (-2, -1, 0, 1, 2)
"""Ends of a shared prefix, in units from a border."""
PRESSURE_PROMPTS = 8
MAX_PRESSURE = 64
"""Requests at once."""

Scenario = Callable[[Prober, Trial], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of scenario; `variants` are its names in the order of a round."""

    name: str
    meaning: str
    variants: tuple[str, ...]
    run: Scenario


def _offset(prober: Prober, variant: str) -> int:
    """Units from a border, of a variant "border+1" or "middle"."""
    return prober.granularity // 2 if variant == "middle" else int(variant.removeprefix("border"))


def _room(prober: Prober) -> int:
    return prober.granularity + 8


async def repeat(prober: Prober, trial: Trial) -> None:
    """The same prompt three times."""
    end = prober.border(_room(prober)) + _offset(prober, trial.variant)
    prompt = prober.prompt(end)
    colds = await prober.cold_arms(trial, prompt)
    lane = await prober.lane()
    for count in range(3):
        await prober.warm(trial, lane, prompt, colds, steps=f"the same prompt asked {count} times before")


async def extend(prober: Prober, trial: Trial) -> None:
    """A cached prefix, then a longer prompt, twice."""
    prefix = prober.prompt(max(1, prober.border(_room(prober)) + _offset(prober, trial.variant)))
    prompt = prefix + prober.prompt(prober.rng.randint(1, prober.granularity + 4))
    colds = await prober.cold_arms(trial, prompt)
    lane = await prober.lane()
    await prober.warm_up(lane, prefix)
    first = await prober.warm(trial, lane, prompt, colds, steps=f"its first {len(prefix)} units asked before")
    again = await prober.warm(trial, lane, prompt, colds, steps="the same prompt asked before")
    _check_monotone(prober, first, again)


def _check_monotone(prober: Prober, first: Answer, again: Answer) -> None:
    """A prompt asked again at once finds at least what it found before."""
    if first.cached_tokens is None or again.cached_tokens is None or prober.server.form.hits != "usage":
        return
    prober.num_monotone += 1
    prober.num_shrunk += again.cached_tokens < first.cached_tokens


async def diverge(prober: Prober, trial: Trial) -> None:
    """A long cached prompt, then another that has its beginning in common."""
    shared = max(1, prober.border(2 * _room(prober)) + _offset(prober, trial.variant))
    other = prober.prompt(shared + prober.granularity + 3)
    prompt = other[:shared] + prober.prompt(
        prober.rng.randint(1, prober.granularity + 4), unlike=other[shared]
    )
    colds = await prober.cold_arms(trial, prompt)
    lane = await prober.lane()
    await prober.warm_up(lane, other)
    await prober.warm(
        trial, lane, prompt, colds, steps=f"another prompt with the same first {shared} units asked before"
    )
    await prober.warm(trial, lane, prompt, colds, steps="the same prompt asked before")


async def truncate(prober: Prober, trial: Trial) -> None:
    """A long cached prompt, then a beginning of it."""
    end = max(1, prober.border(2 * _room(prober)) + _offset(prober, trial.variant))
    other = prober.prompt(end + prober.granularity + 3)
    colds = await prober.cold_arms(trial, other[:end])
    lane = await prober.lane()
    await prober.warm_up(lane, other)
    await prober.warm(
        trial,
        lane,
        other[:end],
        colds,
        steps=f"a prompt of {len(other)} units that begins with it asked before",
    )


async def batch(prober: Prober, trial: Trial) -> None:
    """Many at once: one prompt from all, or several tails of a cached prefix."""
    prefix = prober.prompt(prober.border(_room(prober)) + prober.rng.randint(0, prober.granularity - 1))
    if trial.variant == "same":
        prompts = [prefix] * prober.concurrency
        references = [await prober.cold_arms(trial, prefix)] * prober.concurrency
    else:
        prompts = [prefix + prober.prompt(prober.rng.randint(1, 6)) for _ in range(prober.concurrency)]
        references = [await prober.cold_arms(trial, prompts[0])]
        references += [[await prober.cold(prompt)] for prompt in prompts[1:]]
    lane = await prober.lane()
    if trial.variant == "tails":
        await prober.warm_up(lane, prefix)
    await _together(prober, trial, lane, prompts, references)
    await prober.warm(trial, lane, prompts[-1], references[-1], steps="asked before in a batch")


async def _together(
    prober: Prober, trial: Trial, lane: Lane, prompts: Sequence[Prompt], references: Sequence[list[Answer]]
) -> None:
    steps = f"{len(prompts)} requests at once ({trial.variant})"
    asked = zip(prompts, references, strict=True)
    await all_of(
        *(prober.warm(trial, lane, prompt, colds, alone=False, steps=steps) for prompt, colds in asked)
    )


async def churn(prober: Prober, trial: Trial) -> None:
    """Prompts of one prefix are cached, unique traffic follows, then they are asked again."""
    prefix = prober.prompt(prober.border(3 * _room(prober)))
    prompts = [prefix + prober.prompt(prober.rng.randint(1, 2 * prober.granularity)) for _ in range(3)]
    references = [
        await prober.cold_arms(trial, prompts[0]),
        *[[await prober.cold(prompt)] for prompt in prompts[1:]],
    ]
    lane = await prober.lane()
    before = [await prober.warm_up(lane, prompt) for prompt in prompts]
    tokens = _churn_tokens(prober, trial.variant)
    await unique_traffic(prober, tokens, times=prober.rng.randint(1, 2))
    steps = f"asked before, then {tokens} tokens of other prompts"
    after = [
        await prober.warm(trial, lane, *each, steps=steps) for each in zip(prompts, references, strict=True)
    ]
    if (after[0].cached_tokens or 0) < (before[1].cached_tokens or 0):  # of the prefix that all share
        prober.evictions_seen += 1
    elif not prober.evictions_seen:
        more_churn(prober)
    await unique_traffic(prober, tokens // 4)
    for each in zip(prompts, references, strict=True):
        await prober.warm(
            trial, lane, *each, steps=f"{steps}, asked, then {tokens // 4} tokens of other prompts"
        )


def _churn_tokens(prober: Prober, variant: str) -> int:
    """All tokens that evicted a prompt before, or only a part of them."""
    share = {"all": 1.0, "part": prober.rng.choice((0.4, 0.55, 0.7, 0.85))}[variant]
    return int(prober.churn_tokens * share)


async def unique_traffic(prober: Prober, tokens: int, times: int = 1) -> None:
    """Prompts that were never asked, several at once.

    Asked more than once, since some policies prefer what is.
    """
    length = min(prober.facts.max_units, max(32, tokens // 4))
    count = max(1, tokens // length)
    for begin in range(0, count, prober.concurrency):
        chunk = range(begin, min(count, begin + prober.concurrency))
        asked = [Question(prober.prompt(length), prober.salt(), max_tokens=2) for _ in chunk]
        for _ in range(times):
            await all_of(*(prober.server.ask(question, alone=False) for question in asked))


def more_churn(prober: Prober) -> bool:
    """Doubles the traffic that has evicted nothing.

    False once the most was in vain: then little is sent, since all of the time would go into it.
    """
    prober.most_churned = max(prober.most_churned, prober.churn_tokens)
    if prober.most_churned >= prober.max_churn_tokens:
        prober.churn_tokens = 2 * prober.facts.max_units
        return False
    prober.churn_tokens = min(2 * prober.churn_tokens, prober.max_churn_tokens)
    return True


async def measure_churn(prober: Prober, has_time: Callable[[], bool]) -> None:
    """How many tokens of other prompts evict one: doubles them while there is time."""
    while has_time():
        prompt = prober.prompt(prober.facts.max_units)
        lane = await prober.lane()
        await prober.warm_up(lane, prompt)
        before = await prober.warm_up(lane, prompt)
        await unique_traffic(prober, prober.churn_tokens, times=2)
        after = await prober.warm_up(lane, prompt)
        if not before.cached_tokens or (after.cached_tokens or 0) < before.cached_tokens:
            return
        if not more_churn(prober):
            return


async def pressure(prober: Prober, trial: Trial) -> None:
    """More long answers at once than memory may hold: requests are preempted, and return.

    The cold arm is a few of them alone, and all prompts once at a time.
    """
    prompts = [
        prober.prompt(prober.granularity * (1 + index % 3) + index) for index in range(PRESSURE_PROMPTS)
    ]
    ask_cold = partial(prober.cold, max_tokens=LONG_ANSWER)
    references = [[await ask_cold(prompt)] for prompt in prompts]
    if prober.facts.cold_by != "unique prompts":
        trial.add_cold("again", compare(references[0][0], await ask_cold(prompts[0])))
        if not prober.facts.displacers:
            beside = await all_of(*(ask_cold(prompt, alone=False) for prompt in prompts))
            for colds, answer in zip(references, beside, strict=True):
                trial.add_cold("batch", compare(colds[0], answer))
                colds.append(answer)
            trial.complete = True
    steps = f"{prober.pressure} requests with answers of {LONG_ANSWER} tokens at once"
    ask_warm = partial(prober.warm, trial, alone=False, max_tokens=LONG_ANSWER, steps=steps)
    asked = []
    for index in range(prober.pressure):
        lane = Lane(prober.salt())
        asked.append(ask_warm(lane, prompts[index % len(prompts)], references[index % len(prompts)]))
    await all_of(*asked)
    prober.pressure = min(2 * prober.pressure, MAX_PRESSURE)


async def abort(prober: Prober, trial: Trial) -> None:
    """A request is aborted, in its answer or in its prefill, then asked."""
    prompt = prober.prompt(prober.border(_room(prober)) + prober.rng.randint(0, prober.granularity - 1))
    colds = await prober.cold_arms(trial, prompt)
    lane = await prober.lane()
    after_s = None if trial.variant == "answer" else colds[0].seconds * prober.rng.uniform(0.05, 0.5)
    beside = [Question(prober.prompt(24), prober.salt(), 16) for _ in range(2)]
    aborted = Question(prompt, lane.salt, LONG_ANSWER)
    await all_of(
        prober.server.begin_and_leave(aborted, after_s=after_s),
        *(prober.server.ask(question, alone=False) for question in beside),
    )
    lane.asked.append((prompt, LONG_ANSWER))
    for _ in range(2):
        await prober.warm(trial, lane, prompt, colds, steps=f"asked and aborted in its {trial.variant}")


async def sessions(prober: Prober, trial: Trial) -> None:
    """Two conversations in turn; every turn reuses the turns before, generated tokens included."""
    opening = prober.prompt(prober.border(4 * _room(prober) + LONG_ANSWER))
    histories = [opening + prober.prompt(prober.rng.randint(1, 8)) for _ in range(2)]
    lane = await prober.lane()
    for _ in range(2):
        for index, history in enumerate(histories):
            longer = await _one_turn(prober, lane, history)
            histories[index] = longer + prober.prompt(prober.rng.randint(1, 9))
    asked = [(history, await prober.ask_warm(lane, history)) for history in histories]
    references = [await prober.cold_arms(trial, histories[0]), [await prober.cold(histories[1])]]
    for (history, answer), colds in zip(asked, references, strict=True):
        steps = "the third turn of one of two conversations that take turns"
        prober.record(trial, Question(history, lane.salt, NUM_GENERATED), answer, colds, steps)


async def _one_turn(prober: Prober, lane: Lane, history: Prompt) -> Prompt:
    """Asks, and returns the history with the generated tokens, where those are known."""
    form = prober.server.form
    if form.forced is not None:
        count = prober.rng.randint(4, 20)
        await prober.server.ask(Question(history, lane.salt, count, forced=True))
        longer = history + (form.forced,) * count
    else:
        answer = await prober.server.ask(Question(history, lane.salt, NUM_GENERATED))
        longer = (*history, answer.text) if form.words is not None and answer.text else history
    lane.asked.append((longer, NUM_GENERATED))
    return longer


async def isolation(prober: Prober, trial: Trial) -> None:
    """A prompt is cached under one salt, and asked under others."""
    end = prober.border(_room(prober)) + prober.rng.randint(-1, 2)
    prompt = prober.prompt(max(2, end)) + prober.prompt(3)
    colds = await prober.cold_arms(trial, prompt)
    mine, other = Lane(prober.salt()), Lane(prober.salt())
    if trial.variant == "no salt":
        other = Lane(None)
    elif trial.variant == "longer salt":
        other = Lane(f"{mine.salt}0")
    await prober.warm_up(mine, prompt)
    await prober.warm_up(mine, prompt)
    for asked, steps in (
        (other, f"asked under another salt before ({trial.variant})"),
        (mine, "asked under both salts before"),
    ):
        answer = await prober.warm(trial, asked, prompt, colds, steps=steps)
        if asked is other and (answer.cached_tokens or 0) > 0 and not answer.retried:
            prober.num_salted_hits += 1
            text = f"a prompt cached under one cache_salt had a hit of {answer.cached_tokens} tokens"
            prober.note("isolation", "isolation", f"{text} with {trial.variant}")


async def adapters(prober: Prober, trial: Trial) -> None:
    """A prompt is cached under one model of the server, and asked under another."""
    prompt = prober.prompt(prober.border(_room(prober)) + prober.rng.randint(0, 2))
    colds = await prober.cold_arms(trial, prompt)
    theirs = await prober.cold_arms(trial, prompt, model=trial.variant)
    lane = await prober.lane()
    await prober.warm_up(lane, prompt)
    await prober.warm(trial, lane, prompt, theirs, model=trial.variant, steps="asked of another model before")
    await prober.warm(trial, lane, prompt, colds, steps=f"asked of model {trial.variant} before")


FAMILIES = (
    Family("repeat", "the same prompt again", ("border+0", "border+1", "middle"), repeat),
    Family(
        "extend", "a cached prefix of a longer prompt", (*(f"border{d:+}" for d in OFFSETS), "middle"), extend
    ),
    Family(
        "diverge",
        "a cached prompt that goes on otherwise",
        (*(f"border{d:+}" for d in OFFSETS), "middle"),
        diverge,
    ),
    Family("truncate", "the beginning of a cached prompt", tuple(f"border{d:+}" for d in OFFSETS), truncate),
    Family("batch", "several requests at once", ("same", "tails"), batch),
    Family("churn", "asked again after traffic that evicts", ("all", "part"), churn),
    Family("pressure", "long answers at once, so that some are preempted", ("at once",), pressure),
    Family("abort", "asked after it was aborted", ("answer", "prefill"), abort),
    Family("sessions", "two conversations that take turns", ("two",), sessions),
    Family(
        "isolation", "cached under another cache_salt", ("another salt", "no salt", "longer salt"), isolation
    ),
)
