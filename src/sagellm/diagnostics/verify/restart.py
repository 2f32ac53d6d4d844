"""Probes across a restart of the server.

Caches on disk or in other processes outlive it.
"""

from __future__ import annotations

import asyncio
import time

from sagellm.diagnostics.verify.prober import Prober, Trial
from sagellm.diagnostics.verify.target import Question, RefusedError, UntestableError

NUM_PROMPTS = 8
RESTART_TIMEOUT_S = 600.0


async def restart_trials(prober: Prober, command: str) -> list[Trial]:
    """Asks prompts, runs the command, waits until the server answers, and asks them again.

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
    for trial, prompt, colds, lane in asked:
        await prober.warm(trial, lane, prompt, colds, steps="asked before the server was restarted")
    return [trial for trial, *_ in asked]


async def _restart(prober: Prober, command: str) -> None:
    process = await asyncio.create_subprocess_shell(command)
    try:
        status = await asyncio.wait_for(process.wait(), RESTART_TIMEOUT_S)
    except TimeoutError as error:
        process.kill()
        raise UntestableError(f"the restart command did not end within {RESTART_TIMEOUT_S:.0f} s") from error
    if status:
        raise UntestableError(f"the restart command ended with status {status}")
    until = time.monotonic() + RESTART_TIMEOUT_S
    while True:
        try:
            await prober.server.ask(Question(prober.prompt(8)), alone=False)
            return
        except (UntestableError, RefusedError):
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.5)
