"""The report of `verify` as a self-contained HTML page."""

from __future__ import annotations

import math

from sagellm.diagnostics.pages import render_page
from sagellm.diagnostics.verify.report import VerifyReport

HEADLINES = {
    "clean": "No finding: hits and recomputed prompts give the same answers, within this server's noise.",
    "findings": "Cache hits change answers, or are counted or kept apart wrongly.",
    "untestable": "The server could not be tested.",
}
MAX_PROMPT_CHARS = 4000


def render(report: VerifyReport) -> str:
    """The page. All texts of the server are escaped."""
    return render_page(
        "verify.html.jinja",
        report=report,
        headline=HEADLINES[report.outcome],
        number=_number,
        clipped=lambda value: str(value)[:MAX_PROMPT_CHARS],
    )


def _number(value: float | None) -> str:
    """Three digits, or a word for what is no number."""
    if value is None:
        return "?"
    return f"{value:.3g}" if math.isfinite(value) else "not a number"
