"""Runs the probes against a server, and decides what is a finding."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import sagellm
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import RequestError
from sagellm.diagnostics.verify import statistics
from sagellm.diagnostics.verify.discovery import Discovery, Facts
from sagellm.diagnostics.verify.families import FAMILIES, Family, adapters, measure_churn
from sagellm.diagnostics.verify.prober import NUM_GENERATED, Prober, Trial
from sagellm.diagnostics.verify.report import (
    FamilyResult,
    Finding,
    HitTiming,
    Noise,
    Outcome,
    ServerFacts,
    VerifyReport,
)
from sagellm.diagnostics.verify.restart import restart_trials
from sagellm.diagnostics.verify.target import CHAT, RefusedError, TargetServer, UntestableError
from sagellm.diagnostics.verify.timing import TIMING_LEVEL, measure_timing

LEVEL = 5e-4
"""The probability of any false finding by chance in one run, at most."""
STAGE_LEVEL = (LEVEL - TIMING_LEVEL) / 2
"""The part of each of the two stages."""
TIMING_SHARE = 0.08
"""Of the budget."""

ASSUMED_NOISE = [0.25] * 100
"""Nats by scenario; the noise of servers on which no prompt can be asked cold twice."""
ASSUMED_TEXTS = [1.0] * 5 + [0.0] * 95
"""The same where only texts are compared: one in twenty differs."""

LOUD_NOISE = 0.5
"""Nats; noise that hides much is pointed out."""

WARM_SHARE = 0.7
"""A warm prompt that takes less of a cold one's time shows that there are hits."""

MAX_SUSPECTS = 6
MAX_ERRORS = 3


@dataclass(frozen=True, slots=True)
class Preset:
    """How long a run takes.

    The first stage runs rounds of all variants for `share` of `budget_s`, the second repeats suspicious
    ones, `repeats` times each with fresh prompts. At least one variant of every family runs, however slow
    the server is.
    """

    budget_s: float
    long_tokens: int
    max_rounds: int = 1000
    share: float = 0.6
    repeats: int = 40
    churn_share: float = 0.08


PRESETS: Mapping[str, Preset] = {
    "minute": Preset(budget_s=60.0, long_tokens=1024),
    "hour": Preset(budget_s=3600.0, long_tokens=8192, share=0.8, repeats=200),
}


async def verify(
    url: str,
    preset: str | Preset = "minute",
    *,
    model: str | None = None,
    api_key: str | None = None,
    seed: int = 0,
    concurrency: int = 8,
    restart_command: str | None = None,
    clock: Clock | None = None,
) -> VerifyReport:
    """Tests whether a server answers alike with and without cache hits.

    The same seed draws the same prompts, under new salts; without salts all prompts are new. A server that
    cannot be tested is the outcome "untestable", with the reason. Raises `RequestError` for options out of
    range.
    """
    chosen, name = _preset(preset)
    if not 1 <= concurrency <= 256:
        raise RequestError(f"concurrency {concurrency}: write 1 to 256", "concurrency")
    clock = clock or MonotonicClock()
    began = clock.now()
    try:
        async with TargetServer(url, api_key=api_key, clock=clock) as server:
            verifier = VerifyRun(server, chosen, seed, concurrency, clock)
            report = await verifier.run(model, restart_command)
            report = dataclasses.replace(report, requests=server.num_requests)
    except (UntestableError, RefusedError) as error:
        report = VerifyReport("untestable", reason=str(error))
    return dataclasses.replace(
        report,
        preset=name,
        seed=seed,
        duration_s=clock.now() - began,
        level=LEVEL,
        version=sagellm.__version__,
    )


def _preset(preset: str | Preset) -> tuple[Preset, str]:
    if isinstance(preset, Preset):
        return preset, "custom"
    if preset not in PRESETS:
        raise RequestError(f"no preset {preset!r}, but {', '.join(PRESETS)}", "preset")
    return PRESETS[preset], preset


class VerifyRun:
    """Owns the trials of a run and its limits of time."""

    def __init__(
        self, server: TargetServer, preset: Preset, seed: int, concurrency: int, clock: Clock
    ) -> None:
        self._server = server
        self._preset = preset
        self._seed = seed
        self._concurrency = concurrency
        self._clock = clock
        self._began = clock.now()
        self._trials: list[Trial] = []
        self._repeated: dict[tuple[str, str], list[Trial]] = {}
        self._found: dict[str, float] = {}
        self._errors: list[Finding] = []
        self._families: list[Family] = []
        self._not_tested: dict[str, str] = {}

    async def run(self, model: str | None, restart_command: str | None) -> VerifyReport:
        """The report, without what `verify` adds.

        Raises `UntestableError` or `RefusedError` if the server is lost before the first scenario.
        """
        facts = await Discovery(self._server, self._preset.long_tokens).run(model)
        prober = Prober(self._server, facts, self._seed, self._concurrency)
        timing_until = self._clock.now() + TIMING_SHARE * self._preset.budget_s
        timing = await measure_timing(prober, lambda: self._clock.now() < timing_until)
        speed = facts.max_units / max(timing.cold_s, 1e-4)
        prober.max_churn_tokens = int(
            min(2**20, max(prober.churn_tokens, speed * self._preset.budget_s / 12))
        )
        self._choose_families(facts)
        churn_until = self._clock.now() + self._preset.churn_share * self._preset.budget_s
        await measure_churn(prober, lambda: self._clock.now() < churn_until)
        lost, restarts = "", []
        try:
            await self._first_stage(prober)
            self._judge(facts, _grouped(self._trials))
            await self._second_stage(prober)
            restarts = await restart_trials(prober, restart_command) if restart_command else []
        except UntestableError as error:
            lost = f"the run ended early: {error}"
        if not self._repeated and lost:
            self._judge(facts, _grouped(self._trials))
        self._trials += restarts
        repeated = {" ".join(key): trials for key, trials in self._repeated.items()}
        self._judge(facts, repeated | _grouped(restarts))
        return self._report(prober, timing, lost)

    def _choose_families(self, facts: Facts) -> None:
        self._families = list(FAMILIES)
        if not facts.salts:
            self._families = [family for family in FAMILIES if family.name != "isolation"]
            self._not_tested["isolation"] = (
                "the server does not know cache_salt" if facts.salts is None else ""
            )
        if facts.other_models:
            meaning = "cached by another model of the server"
            self._families.append(Family("adapters", meaning, facts.other_models, adapters))
        else:
            self._not_tested["adapters"] = "the server has no other model that generates"

    async def _first_stage(self, prober: Prober) -> None:
        """Rounds of all variants until the time is over."""
        until = self._began + self._preset.share * self._preset.budget_s
        for number in range(self._preset.max_rounds):
            for index, (family, variant) in enumerate(_round(self._families, prober.rng)):
                needed = number == 0 and index < len(self._families)
                if not needed and self._clock.now() > until:
                    return
                await self._try(prober, family, variant, self._trials)

    async def _try(self, prober: Prober, family: Family, variant: str, trials: list[Trial]) -> None:
        """One scenario. A server's error is a finding; after three of them the run ends."""
        trial = Trial(family.name, variant)
        try:
            await family.run(prober, trial)
        except RefusedError as error:
            self._errors.append(Finding(family.name, "error", f"the server failed: {error}", variant))
            if len(self._errors) >= MAX_ERRORS:
                raise UntestableError(f"the server fails too often: {error}") from error
            return
        trials.append(trial)

    async def _second_stage(self, prober: Prober) -> None:
        """Variants with a warm answer beyond the cold noise are repeated with fresh prompts.

        Those of families that are findings already are not. Beyond means beyond all cold answers but one,
        since the fault may have struck that.
        """
        by_variant: dict[tuple[str, str], float] = defaultdict(float)
        for trial in self._trials:
            key = (trial.family, trial.variant)
            by_variant[key] = max(by_variant[key], trial.warm)
        largest = self._noise_floor()  # of texts, any that differs is suspicious
        if self._server.form.logprobs:
            largest = max(largest, *sorted(self._cold(prober.facts))[:-1])
        suspects = [key for key, size in by_variant.items() if size > largest and key[0] not in self._found]
        suspects.sort(key=lambda key: -by_variant[key])
        self._repeated = {key: [] for key in suspects[:MAX_SUSPECTS]}
        families = {family.name: family for family in self._families}
        until = self._began + self._preset.budget_s
        for _ in range(self._preset.repeats):
            for (name, variant), trials in self._repeated.items():
                if self._clock.now() > until and len(trials) >= 2:
                    return
                await self._try(prober, families[name], variant, trials)

    def _noise_floor(self) -> float:
        form = self._server.form
        if not form.logprobs:
            return 0.1  # texts: 0 or 1
        return statistics.FLOOR if self._measured_paths() else statistics.COARSE_FLOOR

    def _cold(self, facts: Facts) -> list[float]:
        """One number for each scenario: the largest difference of its cold answers.

        Assumed ones where it was not measured how much another shape of computation changes.
        """
        logprobs = self._server.form.logprobs
        if facts.cold_by == "unique prompts":
            return ASSUMED_NOISE if logprobs else ASSUMED_TEXTS
        cold = [trial.cold for trial in self._all_trials() if trial.cold is not None]
        if not logprobs and not self._measured_paths():
            return max(cold, ASSUMED_TEXTS, key=lambda sizes: sum(sizes) / max(1, len(sizes)))
        return cold

    def _measured_paths(self) -> bool:
        return any("path" in trial.arms for trial in self._trials)

    def _judge(self, facts: Facts, groups: Mapping[str, Sequence[Trial]]) -> None:
        """Keeps the families of groups whose warm differences are significant.

        A group's name begins with its family's. Holm's method is for the groups of a stage.
        """
        cold, floor = self._cold(facts), self._noise_floor()
        counts = (trial.num_cold_tokens for trial in self._all_trials() if trial.cold is not None)
        num_cold = sum(counts) or NUM_GENERATED * len(cold)
        p_values = {}
        for name, trials in groups.items():
            p = statistics.rank_test(cold, [trial.ranked for trial in trials], floor=floor)
            if self._server.form.logprobs:
                warm = [trial.warm for trial in trials]
                num_warm = sum(trial.num_warm_tokens for trial in trials)
                tail = statistics.tail_test(cold, warm, num_cold=num_cold, num_warm=num_warm, floor=floor)
                p = 2 * min(p, tail)
            p_values[name] = min(1.0, p)
        for name, p in statistics.holm(p_values, STAGE_LEVEL).items():
            family = name.partition(" ")[0]
            self._found[family] = min(p, self._found.get(family, 1.0))

    def _finding(self, family: str, noise: float) -> Finding:
        trials = [trial for trial in self._all_trials() if trial.family == family]
        above = [trial for trial in trials if trial.warm > statistics.MARGIN * noise] or trials
        worst = max(trials, key=lambda trial: trial.warm)
        where = (
            f"in {len(above)} of {len(trials)} scenarios ({', '.join(sorted({t.variant for t in above}))})"
        )
        if self._server.form.logprobs:
            text = f"by up to {worst.warm:.3g} nats {where}; cold ones differ by at most {noise:.3g}"
        else:
            cold = [trial.cold for trial in self._all_trials() if trial.cold is not None]
            text = f"{where}; cold ones in {sum(map(bool, cold))} of {len(cold)}"
        shown = f"warm and cold answers differ {text}"
        return Finding(family, "answers", shown, worst.variant, self._found[family], worst.evidence)

    def _all_trials(self) -> list[Trial]:
        return [*self._trials, *(trial for trials in self._repeated.values() for trial in trials)]

    def _report(self, prober: Prober, timing: HitTiming, lost: str) -> VerifyReport:
        facts, floor = prober.facts, self._noise_floor()
        cold = self._cold(facts)
        noise = max([floor, *cold])
        findings = [*(self._finding(family, noise) for family in self._found), *self._errors, *_notes(prober)]
        results = tuple(self._family_result(name, noise) for name in self._names())
        outcome: Outcome = "findings" if findings else "clean"
        reason = lost
        if not lost and not findings and not self._any_hit(timing):
            reason = "no hit was seen, neither counted nor by time: is prefix caching on?"
        if reason and not findings:
            outcome = "untestable"
        return VerifyReport(
            outcome,
            tuple(findings),
            results,
            self._noise(cold, floor),
            self._facts(facts),
            timing,
            tuple(self._limits(prober)),
            reason=reason,
        )

    def _any_hit(self, timing: HitTiming) -> bool:
        if any(trial.hit for trial in self._trials):
            return True
        return self._server.form.hits is None and timing.warm_s < WARM_SHARE * timing.cold_s

    def _names(self) -> Iterable[str]:
        return dict.fromkeys(
            [*(f.name for f in self._families), *(t.family for t in self._trials), *self._not_tested]
        )

    def _family_result(self, name: str, noise: float) -> FamilyResult:
        trials = [trial for trial in self._all_trials() if trial.family == name]
        told = [trial.hit for trial in trials if trial.hit is not None]
        return FamilyResult(
            name,
            len(trials),
            sum(told) if told else None,
            sum(trial.warm_divergences > 0 for trial in trials),
            sum(trial.warm > statistics.MARGIN * noise for trial in trials),
            max((trial.warm for trial in trials), default=0.0),
            self._found.get(name),
            self._not_tested.get(name, ""),
        )

    def _noise(self, cold: Sequence[float], floor: float) -> Noise:
        arms: dict[str, float] = {}
        trials = self._all_trials()
        for trial in trials:
            for arm, size in trial.arms.items():
                arms[arm] = max(size, arms.get(arm, 0.0))
        divergences = sum(trial.cold_divergences > 0 for trial in trials)
        return Noise(
            len(cold), max(cold, default=0.0), median(cold) if cold else 0.0, divergences, floor, arms
        )

    def _facts(self, facts: Facts) -> ServerFacts:
        form = self._server.form
        return ServerFacts(
            self._server.root,
            form.model,
            "chat" if form.path == CHAT else "completions",
            form.words is None,
            form.logprobs,
            form.hits or "nothing",
            facts.cold_by,
            facts.granularity,
            facts.smallest,
            facts.max_units + facts.overhead,
            facts.other_models,
        )

    def _limits(self, prober: Prober) -> Iterable[str]:
        yield from prober.facts.limits
        yield from (f"{name}: not tested, since {why}." for name, why in self._not_tested.items() if why)
        noise = max(self._cold(prober.facts), default=0.0)
        if self._server.form.logprobs and noise > LOUD_NOISE:
            yield f"Cold answers differ by up to {noise:.2g} nats: wrong hits that change less are not found."
        if self._server.form.hits and not prober.evictions_seen:
            yield (
                f"churn: {prober.most_churned} tokens of other prompts evicted nothing, so blocks that "
                "return after eviction were not tested; give a smaller KV memory, or the preset hour."
            )


def _grouped(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    """The trials by family."""
    groups: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[trial.family].append(trial)
    return groups


def _round(families: Sequence[Family], rng: random.Random) -> list[tuple[Family, str]]:
    """All variants, one of each family after the other."""
    shuffled = [(family, rng.sample(family.variants, len(family.variants))) for family in families]
    most = max(len(variants) for _, variants in shuffled)
    return [(family, variants[i]) for i in range(most) for family, variants in shuffled if i < len(variants)]


def _notes(prober: Prober) -> Iterable[Finding]:
    """Findings that are no matter of chance."""
    if prober.facts.salts is False:
        text = "the server accepts cache_salt, but a prompt cached under one salt is reused under another"
        yield Finding("isolation", "isolation", text)
    if prober.server.form.hits == "metrics" and prober.num_salted_hits > max(3, prober.num_cold // 2):
        yield Finding("isolation", "isolation", "most prompts under fresh salts had hits, by /metrics")
    if prober.num_shrunk > max(2, prober.num_monotone // 2):
        text = f"cached_tokens shrank in {prober.num_shrunk} of {prober.num_monotone} repeated prompts"
        yield Finding("accounting", "accounting", text)
    for notes in prober.notes.values():
        yield from notes
