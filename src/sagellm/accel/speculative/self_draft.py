"""`self_draft`: the served model proposes itself, with fewer layers or with quantized weights.

Speculative decoding with a part of the model as the draft (Zhang et al. 2024, arXiv:2309.08168: some layers
are skipped; Zhao et al. 2024, arXiv:2410.11305: fewer bits). Proposing is as with any draft; the
backend makes the draft of its own weights (`engines/native/self_draft.py`).
"""

PLUGIN = "sagellm.accel.speculative.draft_model:DraftModel"
