"""`ChainLengths`: how many proposed tokens of each request a step verifies.

A proposed token counts with the chance that it and those before it are accepted, and makes the step longer.
Both are learned while the engine runs, and the chains with most expected tokens per second are chosen. What
a chain is expected to give is the sum of Leviathan et al. (2023), with a chance for each token: what its
proposer says, as such words have turned out so far, or what tokens have had in general; and for each request,
by how much it does better or worse.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FIRST_RATE = 0.7
"""The chance of acceptance, before anything was verified."""
PRIOR_TOKENS = 3.0
"""Tokens with one estimate count as much as the estimate itself once so many were verified."""
REQUEST_PRIOR = 6.0
"""A request's own chance counts as much as the server's once it has verified so many tokens."""
KEPT, KEPT_BY_SERVER = 0.9, 0.99
"""What is kept of the counts at each verification: of a request, of all."""
LEAST_GAIN = 0.05
"""Tokens for each request with a chain that a step must gain at least: times are noisy, and where only some
requests gain, the others end later, in smaller steps."""
GROWTH = 8
"""A step has at most so many times the positions of the largest that was measured: no more is known."""
FIRST_PAUSE, LONGEST_PAUSE = 8, 128
"""Steps until a request whose chains do not pay is tried again. They double with each trial."""
TRIED_TOKENS = 1
"""Proposed tokens of a trial, which is made although it is not expected to pay."""
TRIAL_SHARE = 0.01
"""Of the time of all steps, what trials may lose."""
KEEPING_SHARE = 0.003
"""Of a step, what may go into hidden states for a head that is not asked."""
QUICK = 0.01
"""A proposer that takes less than so much of a step is quick."""
ESTIMATE_CLASSES = 1.0
"""Of a proposer's estimates, for each factor of 2 of their odds."""
LEAST_CHANCE, MOST_CHANCE = 0.001, 0.999
Estimates = Sequence[float | None]
"""Of the tokens of a chain, what a proposer takes for their chances; None where it takes nothing."""
LEAST_ASKED, ASKED_WEIGHT = 4, 1 / 8
"""Calls of a slow proposer until it is known whether it pays, and what the last one counts at least."""
MOST_LOST = 2.0
"""Plain steps that one call counts as lost at most: some record or compile what later ones reuse."""
LIKELY = 0.5
"""Tokens of at least this chance are verified where a slow proposer is tried: it costs as much with one."""
PLAIN_STEPS, PLAIN_EVERY = 3, 100
"""Chains are compared with at least so many steps without any, and one is made again after so many steps."""
EXACT_POSITIONS, PARTS_OF_OCTAVE = 64, 16
NUM_SAMPLES = 9
"""A class has the lower quartile of its first times: what delays a step is seldom its own."""
LEVEL_WEIGHT, RATIO_WEIGHT = 0.1, 0.02
MOST_ERROR = math.log(1.5)
"""Of one time, as far as it counts."""


class MeasuredTimes:
    """Seconds by size: a step by its positions, a proposer by its tokens.

    Sizes up to 64 are kept apart, larger ones in 16 classes for each power of two. A class has a ratio to a
    level that follows slow changes (a context that grows, other load) for all classes. The first step of a
    class is left out: it may record or compile what later ones reuse.
    """

    def __init__(self) -> None:
        self._level_s = 0.0
        self._begun: set[int] = set()
        self._samples: dict[int, list[float]] = {}
        """The first ratios of a class. Once there are enough, its ratio follows in small steps."""
        self._classes: list[int] = []
        self._sizes: list[float] = []
        self._ratios: list[float] = []
        """By class with enough samples, their mean size, which follows, and ratio to the level."""

    @property
    def largest(self) -> float:
        """The mean size of the largest known class. 0 before the first step."""
        return self._sizes[-1] if self._sizes else 0.0

    def has_begun(self, num_positions: int) -> bool:
        """Whether the first step of this size is over; it may record or compile."""
        return _size_class(num_positions) in self._begun

    def observe(self, num_positions: int, seconds: float) -> None:
        """Ignores what took no time, as with a scripted clock.

        A class that is known moves the level, and its own ratio less, in the same direction. So the level
        strays no further than what is measured, and classes that are not measured meanwhile stay right.
        """
        if seconds <= 0 or num_positions < 1:
            return
        size_class = _size_class(num_positions)
        if size_class not in self._begun:
            self._begun.add(size_class)
            return
        if not self._samples:
            self._level_s = seconds
        samples = self._samples.setdefault(size_class, [])
        place = bisect.bisect_left(self._classes, size_class)
        if len(samples) == NUM_SAMPLES:
            error = math.log(seconds / (self._level_s * self._ratios[place]))
            error = min(max(error, -MOST_ERROR), MOST_ERROR)
            self._level_s *= math.exp(LEVEL_WEIGHT * error)
            self._ratios[place] *= math.exp(RATIO_WEIGHT * error)
        else:
            samples.append(seconds / self._level_s)
            if len(samples) == 1 and self._classes:  # perhaps a step that was delayed
                return
            if place == len(self._classes) or self._classes[place] != size_class:
                self._classes.insert(place, size_class)
                self._sizes.insert(place, float(num_positions))
                self._ratios.insert(place, 0.0)
            self._ratios[place] = sorted(samples)[len(samples) // 4]
        self._sizes[place] += (num_positions - self._sizes[place]) / len(samples)

    def seconds(self, num_positions: int) -> float:
        """Between known sizes a line; beyond them as long as the nearest. 0 before the first step."""
        above = bisect.bisect_left(self._sizes, num_positions)
        if above == len(self._sizes):
            return self._level_s * self._ratios[-1] if self._ratios else 0.0
        if above == 0:
            return self._level_s * self._ratios[0]
        low, high = self._sizes[above - 1], self._sizes[above]
        part = (num_positions - low) / (high - low)
        return self._level_s * ((1 - part) * self._ratios[above - 1] + part * self._ratios[above])


@dataclass(slots=True)
class _Counts:
    """Proposed tokens that were decided on, and accepted ones; old ones fade.

    Of a request a token is decided in part: as far as it was expected to be accepted.
    """

    decided: float = 0.0
    accepted: float = 0.0

    def add(self, decided: float, accepted: float, kept: float) -> None:
        self.decided = kept * self.decided + decided
        self.accepted = kept * self.accepted + accepted


class Acceptance:
    """Owns the chances that a token is accepted once those before are.

    A token has the chance of those for which the proposer's estimate was about the same, or without estimates
    the chance of all; and that times how much better or worse its request does.
    """

    def __init__(self) -> None:
        self._all = _Counts()
        self._classes: dict[int, _Counts] = {}
        self._requests: dict[str, _Counts] = {}

    def chance(self, request_id: str, estimate: float | None = None) -> float:
        """Of a token of the request."""
        general = self._general(estimate)
        own = self._requests.get(request_id)
        if own is None:
            return general
        prior = REQUEST_PRIOR * general
        return min(general * (own.accepted + prior) / (own.decided + prior), MOST_CHANCE)

    def _general(self, estimate: float | None) -> float:
        if estimate is None:
            counts, prior = self._all, FIRST_RATE
        else:
            counts, prior = self._classes.get(_estimate_class(estimate), _Counts()), estimate
        rate = (counts.accepted + PRIOR_TOKENS * prior) / (counts.decided + PRIOR_TOKENS)
        return min(max(rate, LEAST_CHANCE), MOST_CHANCE)

    def verified(self, request_id: str, num_accepted: int, decided: Estimates) -> None:
        """Tokens with these estimates were decided on; the first so many were accepted."""
        self._all.add(len(decided), num_accepted, KEPT_BY_SERVER)
        for place, estimate in enumerate(decided):
            if estimate is not None:
                alike = self._classes.setdefault(_estimate_class(estimate), _Counts())
                alike.add(1, place < num_accepted, KEPT_BY_SERVER)
        own = self._requests.setdefault(request_id, _Counts())
        own.add(sum(map(self._general, decided)), num_accepted, KEPT)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)


@dataclass(slots=True)
class _Pause:
    """Of a request whose chains do not pay.

    `left` steps until a trial, of `length` in all. `estimates`: of the tokens that it was last asked about.
    """

    left: int = 0
    length: int = 0
    estimates: Estimates = ()


@dataclass(slots=True)
class _Asked:
    """What asking a proposer has gained, in plain steps.

    `mean`: old calls fade in it. `last`: of the last call.
    """

    count: int = 0
    mean: float = 0.0
    last: float = 0.0

    def add(self, gained: float) -> None:
        self.count += 1
        self.mean += max(1 / self.count, ASKED_WEIGHT) * (gained - self.mean)
        self.last = gained

    @property
    def pays(self) -> bool:
        """Or may pay: little is known, or it has paid in the last call."""
        return self.count < LEAST_ASKED or self.mean >= 0 or self.last >= 0


class ChainLengths:
    """Owns what an engine knows of acceptance and of step times."""

    def __init__(self) -> None:
        self.times = MeasuredTimes()
        self.acceptance = Acceptance()
        self._pauses: dict[str, _Pause] = {}
        self._num_steps = 0
        self._spent_s = self._trials_s = 0.0
        """Of all steps, and what trials were expected to lose."""
        self.proposing = MeasuredTimes()
        """Of calls of the proposer, by the longest proposal."""
        self._is_quick = True
        """Whether the proposer takes next to nothing beside a step."""
        self._asked: dict[int, _Asked] = {}
        """By power of two of the rows, what a slow proposer has gained."""
        self._is_trial = False
        """Whether a slow proposer is asked though it does not pay."""
        self._is_first = False
        """Whether the step, or the proposer's call for it, was the first of its size."""
        self._has_estimates = False
        self._plain: dict[int, tuple[int, int]] = {}
        """Of steps without chains and prompts, by power of two of their rows: how many, and the last one."""

    def step_took(self, num_rows: int, num_prompt_tokens: int, num_proposed: int, seconds: float) -> None:
        """Learn from an executed step: its positions are the sum of the three numbers."""
        self._num_steps += 1
        self._spent_s += seconds
        num_positions = num_rows + num_prompt_tokens + num_proposed
        self._is_first |= not self.times.has_begun(num_positions)
        self.times.observe(num_positions, seconds)
        if not num_prompt_tokens and not num_proposed:
            num_before, _ = self._plain.get(num_rows.bit_length(), (0, 0))
            self._plain[num_rows.bit_length()] = num_before + 1, self._num_steps

    def should_ask(self, num_rows: int, num_prompt_tokens: int) -> bool:
        """Whether to ask the proposer about any request of a step.

        A quick one always is. A slow one is not where it has not paid for as many requests, but for trials;
        nor in a step without chains.
        """
        self._is_trial = False
        if self.pays(num_rows):
            return bool(num_prompt_tokens) or self._is_quick or not self._needs_plain_step(num_rows)
        if self._is_quick:
            return True
        self._is_trial = not num_prompt_tokens and self.is_trial_due(num_rows)
        return self._is_trial

    def is_trial_due(self, num_rows: int) -> bool:
        """Whether a proposer that has not paid with so many rows may be tried."""
        lost_s = max(0.0, -self._asked[num_rows.bit_length()].mean) * self.times.seconds(num_rows)
        return self._trials_s + lost_s <= TRIAL_SHARE * self._spent_s

    def pays(self, num_rows: int) -> bool:
        """Whether asking the proposer pays with so many rows, or may."""
        asked = self._asked.get(num_rows.bit_length())
        return asked is None or asked.pays

    def is_much(self, seconds: float, num_rows: int) -> bool:
        """Whether so long matters beside a step."""
        return seconds > KEEPING_SHARE * self.times.seconds(num_rows)

    def asking_gave(self, num_rows: int, num_prompt_tokens: int, num_accepted: int, spent_s: float) -> None:
        """A step has accepted so many proposed tokens.

        `spent_s`: what it has taken, with all that was done for proposals. Steps of a size that was never
        computed are left out: they may record or compile what later ones reuse. So are steps without rows.
        """
        is_first, self._is_first = self._is_first, False
        if is_first or not num_rows:
            return
        num_others = num_rows + num_prompt_tokens
        plain_s = self.times.seconds(num_others)
        gained_s = plain_s * (1 + num_accepted / num_others) - spent_s
        asked = self._asked.setdefault(num_rows.bit_length(), _Asked())
        if not asked.pays or asked.mean < 0:
            self._trials_s += max(0.0, -gained_s)
        asked.add(max(gained_s / (plain_s or 1.0), -MOST_LOST))

    def may_propose(self, request_id: str) -> bool:
        """Whether to ask the proposer in this step. Each call shortens a pause by one.

        A quick one that estimates is asked in a pause too: it may see a better chance.
        """
        pause = self._pauses.get(request_id)
        if pause is None or not pause.left:
            return True
        pause.left -= 1
        return self._has_estimates and self._is_quick

    def proposing_took(self, num_tokens: int, seconds: float) -> None:
        """The proposer has taken so long. `num_tokens`: of its longest proposal, perhaps none."""
        self._is_first = not self.proposing.has_begun(max(1, num_tokens))
        self.proposing.observe(max(1, num_tokens), seconds)
        self._is_quick = self.proposing.seconds(1) < QUICK * self.times.seconds(1)

    def worth_proposing(self, request_ids: Sequence[str], num_rows: int, most: int) -> int:
        """How many tokens to ask for, 1 to `most`, to make most per second.

        What a draft takes grows with them, since it draws one after the other, for all requests at once. Of
        a quick proposer all are wanted: `choose` sees what it says of each.
        """
        if self._is_quick:
            return most
        rate, num_asked = max(map(self.acceptance.chance, request_ids)), len(request_ids)
        best, best_speed, chance, expected = 1, 0.0, 1.0, float(num_rows)
        for number in range(1, most + 1):
            chance *= rate
            expected += num_asked * chance
            step_s = self.times.seconds(num_rows + number * num_asked) + self.proposing.seconds(number)
            if expected / (step_s or 1.0) >= best_speed:
                best, best_speed = number, expected / (step_s or 1.0)
        return best

    def choose(
        self, proposals: Sequence[tuple[str, Estimates]], num_rows: int, num_prompt_tokens: int,
        trees: Mapping[str, Sequence[int]] | None = None,
    ) -> list[int]:  # fmt: skip
        """How many tokens of each proposal to verify. `proposals`: the request's id, and for each token the
        proposer's estimate of its chance. `trees`: by id, the parents of tokens that are a tree.

        The step has `num_rows` requests in decode and so many prompt tokens. Takes proposed tokens in the
        order of their chances, as many as make most tokens per second; prompt tokens count too, so chains do
        not hold up prompts. A request that gets none pauses, and is tried with one token afterwards.
        Costs O(n log n) in the proposed tokens.
        """
        if not num_prompt_tokens and not self._is_trial and self._needs_plain_step(num_rows):
            return [0] * len(proposals)
        num_others = num_rows + num_prompt_tokens
        chances: list[tuple[float, int]] = []
        for index, (name, estimates) in enumerate(proposals):
            parents, reached = (trees or {}).get(name), [1.0]
            for place, estimate in enumerate(estimates):
                before = reached[place if parents is None else 1 + parents[place]]
                reached.append(before * self.acceptance.chance(name, estimate))
                chances.append((reached[-1], index))
        chances.sort(reverse=True)
        plain_s = self.times.seconds(num_others)
        speed = num_others / (plain_s or 1.0)
        num_best, expected, gain = 0, float(num_others), 0.0
        most = GROWTH * max(num_others, int(self.times.largest)) - num_others
        del chances[most:]
        for number, (chance, _) in enumerate(chances, 1):
            expected += chance
            now = expected / (self.times.seconds(num_others + number) or 1.0)
            if now >= speed:
                num_best, speed, gain = number, now, expected - num_others
        if self._is_trial:
            num_best = max(num_best, sum(chance >= LIKELY for chance, _ in chances))
        lengths = Counter(index for _, index in chances[:num_best])
        longest = max(lengths.values(), default=0)
        step_s = self.times.seconds(num_others + num_best) + (longest and self.proposing.seconds(longest))
        speed = (num_others + gain) / (step_s or 1.0)
        is_gain = speed * (plain_s or 1.0) - num_others >= LEAST_GAIN * len(proposals)
        if not is_gain and not self._is_trial:
            lengths.clear()
        return [
            self._with_pause(name, estimates, lengths[index], num_others)
            for index, (name, estimates) in enumerate(proposals)
        ]

    def _needs_plain_step(self, num_rows: int) -> bool:
        count, last = self._plain.get(num_rows.bit_length(), (0, 0))
        return count < PLAIN_STEPS or self._num_steps - last > PLAIN_EVERY

    def verified(self, request_id: str, num_proposed: int, num_accepted: int) -> None:
        """A step has verified the first so many of the tokens chosen last."""
        pause = self._pauses.get(request_id)
        estimates = (None,) * num_proposed if pause is None else pause.estimates[:num_proposed]
        self.acceptance.verified(request_id, num_accepted, estimates[: num_accepted + 1])

    def forget(self, request_id: str) -> None:
        self.acceptance.forget(request_id)
        self._pauses.pop(request_id, None)

    def _with_pause(self, request_id: str, estimates: Estimates, length: int, num_others: int) -> int:
        """The length, or that of a trial. Starts a pause for a request whose chain does not pay."""
        self._has_estimates |= estimates[0] is not None
        pause = self._pauses.setdefault(request_id, _Pause())
        pause.estimates = estimates
        if length:
            pause.left = pause.length = 0
            return length
        if pause.left:
            return 0
        is_first = not pause.length
        pause.left = pause.length = FIRST_PAUSE if is_first else min(LONGEST_PAUSE, 2 * pause.length)
        plain_s = self.times.seconds(num_others)
        gained_s = self.acceptance.chance(request_id, estimates[0]) * plain_s / num_others
        lost_s = max(0.0, self.times.seconds(num_others + TRIED_TOKENS) - plain_s - gained_s)
        if is_first or self._trials_s + lost_s > TRIAL_SHARE * self._spent_s:
            return 0
        self._trials_s += lost_s
        return TRIED_TOKENS


def _size_class(num_positions: int) -> int:
    """The number itself up to 64. Above, each power of two has 16 classes."""
    if num_positions <= EXACT_POSITIONS:
        return num_positions
    width = (1 << (num_positions.bit_length() - 1)) // PARTS_OF_OCTAVE
    return num_positions // width * width


def _estimate_class(estimate: float) -> int:
    """Equal for estimates with about the same odds."""
    chance = min(max(estimate, LEAST_CHANCE), MOST_CHANCE)
    return round(ESTIMATE_CLASSES * math.log2(chance / (1 - chance)))
