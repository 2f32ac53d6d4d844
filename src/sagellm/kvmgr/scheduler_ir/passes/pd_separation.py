"""Chooses the instances for prefill and decode of each request, by a cost model.

Serving the two phases on separate instances, since they slow each other down, is the idea of DistServe (Zhong
et al., 2024) and Splitwise (Patel et al., 2024).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sagellm.core.errors import ConfigError
from sagellm.core.plan import Draft, PhasePlacement, RequestState, Transfer
from sagellm.core.protocols.scheduler_ir import ALWAYS_STABLE, SchedulingView, Stability
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.scheduler_ir._queue import RankedQueue, prefix_hit
from sagellm.kvmgr.scheduler_ir._step_time import StepTimeModel

THIS_INSTANCE = ""
STEADY = 0.9
"""Weight of the past in the mean step time."""
NOT_ADMITTED, NOT_SENT = -2, -1
"""States of a placed request before its KV is sent; then, its number of preemptions at that time."""
OPTIONS = ("link_bytes_s", "token_s", "step_s", "seq_s")
"""Options of a site in a configuration."""


@dataclass(slots=True)
class Site:
    """The speed of another instance, and the load placed on it.

    `token_s`: seconds per prompt token (0: it takes no prompts). `step_s`: seconds of a decode step (0: it
    does not decode), plus `seq_s` for each request in it. `link_bytes_s`: bytes per second of the link to it.
    """

    link_bytes_s: float
    token_s: float = 0.0
    step_s: float = 0.0
    seq_s: float = 0.0
    free_at_s: float = 0.0
    num_decodes: int = 0

    def __post_init__(self) -> None:
        for name in OPTIONS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"{name} of a site must be a number from 0 on, got {value!r}")
        if not self.link_bytes_s:
            raise ConfigError("link_bytes_s of a site must be positive, got 0")

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any]) -> Site:
        """A site from a configuration; raises `ConfigError` for unknown and missing options."""
        what = f"site {name!r} of pd_separation"
        if not isinstance(options, Mapping):
            raise ConfigError(f"{what} must be a mapping of {', '.join(OPTIONS)}, got {options!r}")
        unknown = [str(option) for option in options if option not in OPTIONS]
        if unknown:
            raise ConfigError(f"{what} has no option {unknown[0]!r}; it takes {', '.join(OPTIONS)}")
        if "link_bytes_s" not in options:
            raise ConfigError(f"{what} needs link_bytes_s, bytes per second of the link to it")
        return cls(**options)


class PDSeparationPass:
    """Decides which instance computes a request's prompt and which decodes ("": this one).

    The decision is in `placements`, by request id, and in the draft once the request runs. If it decodes
    elsewhere, a transfer of its KV is added to `draft.transfers` in the step after its prompt is computed.

    `sites` are the other instances, by name. A prompt is placed where it is done first: queue, computation
    and transfer back. A request decodes elsewhere if it ends sooner there by the share `margin`: the transfer
    and `expected_output` steps there, against as many steps of the mean length that decode steps have on this
    instance, prompts of others included. So requests with short outputs or long prompts stay. Without sites
    the pass does nothing; with sites the backend must have the feature `pd_separation`.
    """

    name = "pd_separation"

    def __init__(
        self,
        sites: Mapping[str, Site | Mapping[str, Any]] | None = None,
        *,
        bytes_per_token: int = 131072,
        expected_output: int = 256,
        margin: float = 0.1,
    ) -> None:
        sites = {} if sites is None else sites
        if not isinstance(sites, Mapping):
            raise ConfigError(f"sites of pd_separation must be a mapping by name, got {sites!r}")
        self.sites = {
            name: site if isinstance(site, Site) else Site.of(name, site) for name, site in sites.items()
        }
        self.bytes_per_token, self.expected_output, self.margin = bytes_per_token, expected_output, margin
        self.requires = frozenset({self.name} if self.sites else ())
        self.placements: dict[str, PhasePlacement] = {}
        self.step_time = StepTimeModel()
        self._mixed_step_s = 0.0  # mean step with decodes, prompts of others included
        self._queue = RankedQueue()
        self._num_queued_tokens = 0
        self._placed: dict[RequestState, int] = {}

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        if not self.sites:
            return
        facts = view.last_step
        self.step_time.observe(facts)
        if facts.num_decodes:
            old = self._mixed_step_s or facts.duration_s
            self._mixed_step_s = STEADY * old + (1 - STEADY) * facts.duration_s
        if self._placed:
            self._follow(draft)
        if (draft.waiting or self._queue.ranks) and self._queue.update(draft.waiting):
            for state in self._queue.arrived:
                num_tokens = len(state.tokens) - prefix_hit(draft, view, state).num_tokens
                self._queue.rerank(state, num_tokens)
                if not state.resumes:
                    self._place(draft, state, num_tokens)
            self._num_queued_tokens = sum(self._queue.ranks.values())

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        return None if self.sites else ALWAYS_STABLE

    # -- where a request runs

    def _place(self, draft: Draft, state: RequestState, num_tokens: int) -> None:
        prefill, prefill_s = self._best_prefill(draft, num_tokens)
        decode = self._best_decode(state)
        if prefill != THIS_INSTANCE:
            site = self.sites[prefill]
            site.free_at_s = max(site.free_at_s, draft.step.now_s) + site.token_s * num_tokens
            draft.record(self.name, state, "place", f"prefill on {prefill}: done in {prefill_s:.3f} s")
        if decode != THIS_INSTANCE:
            self.sites[decode].num_decodes += 1
            draft.record(self.name, state, "place", f"decode on {decode}")
        if (prefill, decode) != (THIS_INSTANCE, THIS_INSTANCE):
            self.placements[state.request_id] = PhasePlacement(prefill, decode)
            self._placed[state] = NOT_ADMITTED

    def _best_prefill(self, draft: Draft, num_tokens: int) -> tuple[str, float]:
        ahead = self._num_queued_tokens + sum(chunk.num_tokens for chunk in draft.chunks.values())
        seconds = {
            name: max(0.0, site.free_at_s - draft.step.now_s)
            + site.token_s * num_tokens
            + self._transfer_s(site, num_tokens)
            for name, site in self.sites.items()
            if site.token_s
        }
        return self._fastest(self.step_time.prefill_s(ahead + num_tokens, draft.token_budget), seconds)

    def _best_decode(self, state: RequestState) -> str:
        limit = state.max_output_tokens
        steps = self.expected_output if limit is None else min(self.expected_output, limit)
        seconds = {
            name: self._transfer_s(site, state.num_prompt_tokens)
            + steps * (site.step_s + site.seq_s * (site.num_decodes + 1))
            for name, site in self.sites.items()
            if site.step_s
        }
        return self._fastest(steps * (self._mixed_step_s or self.step_time.step_s), seconds)[0]

    def _fastest(self, local_s: float, seconds: Mapping[str, float]) -> tuple[str, float]:
        """This instance, or a site that is faster by the margin; and its seconds."""
        best, best_s = THIS_INSTANCE, local_s
        for name, site_s in seconds.items():
            if site_s < best_s * (1 - self.margin):
                best, best_s = name, site_s
        return best, best_s

    def _transfer_s(self, site: Site, num_tokens: int) -> float:
        return num_tokens * self.bytes_per_token / site.link_bytes_s

    # -- placed requests

    def _follow(self, draft: Draft) -> None:
        """Add transfers of computed prompts, again after a preemption; remove finished requests."""
        for state, sent in list(self._placed.items()):
            placement = self.placements[state.request_id]
            decode = placement.decode
            if state.status is RequestStatus.FINISHED:
                del self._placed[state], self.placements[state.request_id]
                if decode != THIS_INSTANCE:
                    self.sites[decode].num_decodes -= 1
            elif state.status is RequestStatus.RUNNING and sent == NOT_ADMITTED:
                known = draft.placements.get(state.request_id, placement)  # of another pass
                draft.placements[state.request_id] = replace(
                    known, prefill=placement.prefill, decode=placement.decode
                )
                self._placed[state] = NOT_SENT
            elif decode != THIS_INSTANCE and sent != state.num_preemptions and state.decoding:
                draft.transfers.append(Transfer(state.request_id, (), decode))
                draft.record(self.name, state, "transfer", f"its prompt is computed; it decodes on {decode}")
                self._placed[state] = state.num_preemptions


PLUGIN = PDSeparationPass
