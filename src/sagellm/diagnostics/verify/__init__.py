"""`sagellm verify`: tests whether a running server answers alike with and without cache hits."""

from sagellm.diagnostics.verify.report import Finding, VerifyReport
from sagellm.diagnostics.verify.verifier import PRESETS, Preset, verify

__all__ = ["PRESETS", "Finding", "Preset", "VerifyReport", "verify"]
