"""Routing to experts and the weighted sum of their rows, in C++.

A step's rows are sorted by expert without torch, so that decode steps with experts can be recorded.
"""

from __future__ import annotations

import torch

from sagellm.accel.fusion.cpu.calls import DTYPE_CODES, CpuKernel, floats, int32s, int64s, pointers, structure
from sagellm.accel.fusion.expert_kernels import CombineExperts, RouteToExperts
from sagellm.core.protocols.fusion import Routes, RoutingRule

_Route = structure(
    "Route",
    pointers("logits", "correction", "weights", "places", "tokens", "starts", "counts"),
    int64s("rows", "experts", "per_token", "groups", "kept_groups", "group_best"),
    floats("scale"),
    int32s("is_sigmoid", "renormalize"),
)

_Combine = structure(
    "Combine",
    pointers("x", "weights", "places", "added", "y"),
    int64s("rows", "columns", "per_token", "x_rows"),
    int32s("type"),
)


class CpuRouteToExperts(CpuKernel, RouteToExperts):
    """`RouteToExperts` on a CPU. Of equal scores the first is chosen."""

    c_name = "sagellm_route"

    def _compute(
        self, logits: torch.Tensor, correction: torch.Tensor | None, rule: RoutingRule, counts: torch.Tensor
    ) -> Routes:
        rows, experts = logits.shape
        weights = logits.new_empty(rows, rule.per_token)
        places = weights.new_empty(weights.shape, dtype=torch.int64)
        tokens = places.new_empty(places.numel())
        starts = places.new_empty(experts + 1)
        job = _Route(
            logits.data_ptr(), None if correction is None else correction.data_ptr(), weights.data_ptr(),
            places.data_ptr(), tokens.data_ptr(), starts.data_ptr(), counts.data_ptr(), rows, experts,
            rule.per_token, rule.groups, rule.kept_groups, rule.group_best, rule.scale,
            rule.scoring == "sigmoid", rule.renormalize,
        )  # fmt: skip
        routes = Routes(tokens, starts, places, weights)
        self._call(self.name, self._function, job, logits, correction, counts, routes)
        return routes


class CpuCombineExperts(CpuKernel, CombineExperts):
    """`CombineExperts` on a CPU. A place outside the rows is a `KernelError`."""

    c_name = "sagellm_combine"

    def _compute(
        self, outputs: torch.Tensor, routes: Routes, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, per_token = routes.weights.shape
        if added is not None and not added.is_contiguous():  # as a projection may return it
            added = added.contiguous()
        y = outputs.new_empty(rows, outputs.shape[1])
        job = _Combine(
            outputs.data_ptr(), routes.weights.data_ptr(), routes.places.data_ptr(),
            None if added is None else added.data_ptr(), y.data_ptr(), rows, outputs.shape[1], per_token,
            len(outputs), DTYPE_CODES[outputs.dtype],
        )  # fmt: skip
        self._call(self.name, self._function, job, outputs, routes, added, y)
        return y
