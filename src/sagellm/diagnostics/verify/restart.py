"""Probes across a restart of the server.

Caches on disk or in other processes outlive it.
"""

from __future__ import annotations

import asyncio

from sagellm.diagnostics.verify.answers import compare
from sagellm.diagnostics.verify.prober import NUM_GENERATED, Prober, Trial
from sagellm.diagnostics.verify.target import RETRY_S, Question, RefusedError, UntestableError

NUM_PROMPTS = 8
RESTART_TIMEOUT_S = 600.0


async def restart_trials(prober: Prober, command: str) -> list[Trial]:
    """Asks prompts, runs the command, waits until the server answers, and asks them again.

    Cold answers of the restarted server are among the cold ones, since it may compute in other shapes.
    Raises `UntestableError` if the command fails or the server does not come back.
    """
    asked = []
    for index in range(NUM_PROMPTS):
        trial = Trial("restart", "restarted")
        prompt = prober.prompt(prober.border(prober.granularity + 8) + index % 3)
        colds = await prober.cold_arms(trial, prompt)
        lane = await prober.lane()
        await prober.warm(trial, lane, prompt, colds, steps="new")
        await prober.warm(trial, lane, prompt, colds, steps="the same prompt asked before")
        asked.append((trial, prompt, colds, lane))
    await _restart(prober, command)
    answers = [await prober.ask_warm(lane, prompt) for _, prompt, _, lane in asked]
    for (trial, prompt, colds, lane), answer in zip(asked, answers, strict=True):
        if prober.facts.cold_by != "unique prompts":
            colds.append(await prober.cold(prompt))
            trial.add_cold("restart", compare(colds[0], colds[-1]))
        steps = "asked before the server was restarted"
        prober.record(trial, Question(prompt, lane.salt, NUM_GENERATED), answer, colds, steps)
    return [trial for trial, *_ in asked]


async def _restart(prober: Prober, command: str) -> None:
    process = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.DEVNULL)
    try:
        status = await asyncio.wait_for(process.wait(), RESTART_TIMEOUT_S)
    except TimeoutError as error:
        process.kill()
        raise UntestableError(f"the restart command did not end within {RESTART_TIMEOUT_S:.0f} s") from error
    if status:
        raise UntestableError(f"the restart command ended with status {status}")
    try:
        async with asyncio.timeout(RESTART_TIMEOUT_S):
            while not await _answers(prober):
                await asyncio.sleep(RETRY_S)
    except TimeoutError as error:
        text = f"the server did not answer within {RESTART_TIMEOUT_S:.0f} s of the restart command"
        raise UntestableError(text) from error


async def _answers(prober: Prober) -> bool:
    try:
        await prober.server.ask(Question(prober.prompt(8)), alone=False)
    except (UntestableError, RefusedError):
        return False
    return True
