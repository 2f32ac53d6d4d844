"""Multi-head latent attention (DeepSeek-V2: arXiv:2405.04434): the cache holds one vector per token.

That vector is the normed latent, `rank` numbers, and a rotated key of `rope_dim` numbers which all heads
share. Both forms of the same attention are computed here:

* absorbed, for decode: the query is multiplied into the latent space, so that all heads attend to the cached
  vector itself, as one KV head. Its values are its first `rank` numbers. No key or value of a head is made.
* expanded, for long prefill chunks: keys and values of all heads are made from the latents of the context.
  That is fewer multiplications where many queries share them (`fewer_expanded`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from sagellm.core.protocols.fusion import FusedKernel, KernelSet, LinearKernel, Matrix, Scores
from sagellm.engines.native.attention import AttentionPlan, PrefillPlan, Span, attend, attend_chunk
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.latent_spec import LatentSpec
from sagellm.engines.native.rope import apply_rope

_NORM_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` is, as in transformers."""
MOST_EXPANDED = 128 << 20
"""Keys and values of a chunk's context, in numbers; a longer one is attended to in absorbed form."""


def fewer_expanded(latent: LatentSpec, num_heads: int, span: Span) -> bool:
    """Whether a chunk takes fewer multiplications in expanded form. Multiplying a query into the latent space
    costs as many as expanding a key, so the chunk's own tokens cost the same in both forms.
    """
    if span.end * num_heads * (latent.key_dim + latent.value_dim) > MOST_EXPANDED:
        return False
    keys_seen = span.num_tokens * (span.start + span.num_tokens / 2)
    saved = latent.width + latent.rank - latent.key_dim - latent.value_dim
    return keys_seen * saved > span.start * latent.rank * (latent.nope_dim + latent.value_dim)


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """A matrix for each head: `dense` [heads, inputs, outputs], or a kernel's `stack`."""

    dense: torch.Tensor | None
    stack: Matrix | None

    @classmethod
    def of(cls, weight: torch.Tensor, linear: LinearKernel | None) -> HeadMatrices:
        """Those of `weight` [heads, outputs, inputs]."""
        heads, outputs, inputs = weight.shape
        if linear is None or not linear.multiplies(weight.dtype, weight.dtype):
            return cls(weight.mT.contiguous(), None)
        stack = linear.empty(heads * outputs, inputs, weight.dtype, torch.zeros)
        stack.store(0, weight.reshape(-1, inputs))
        return cls(None, stack)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T, heads, inputs] to [T, heads, outputs]."""
        by_head = x.transpose(0, 1)
        if self.stack is None:
            assert self.dense is not None
            return torch.bmm(by_head, self.dense).transpose(0, 1)
        heads, rows = by_head.shape[:2]
        starts = torch.arange(0, heads * rows + 1, rows)
        product: torch.Tensor = self.stack.multiply_grouped(by_head.reshape(heads * rows, -1), starts)
        return product.view(heads, rows, -1).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """Weights of one layer's latent attention, beside its first and its last projection.

    `query_up` gives the heads' queries from a normed latent query; None where the first projection does.
    `kv_up` [heads x (nope_dim + value_dim), rank] gives keys and values. `absorb_key`, from nope_dim to rank,
    and `absorb_value`, from rank to value_dim, are the same weights. `add_rms_norm` does the norms, if there
    is such a kernel.
    """

    spec: LatentSpec
    add_rms_norm: FusedKernel | None
    query_norm: torch.Tensor | None
    query_up: Matrix | None
    kv_norm: torch.Tensor
    kv_up: Matrix
    absorb_key: HeadMatrices
    absorb_value: HeadMatrices

    @classmethod
    def of(
        cls, spec: LatentSpec, kernels: KernelSet, query_norm: torch.Tensor | None,
        query_up: Matrix | None, kv_norm: torch.Tensor, kv_up: Matrix,
    ) -> LatentLayer:  # fmt: skip
        """The layer with its absorbed weights. They are read off the matrix, whatever form that has."""
        unit = torch.eye(spec.rank, dtype=kv_norm.dtype, device=kv_norm.device)
        weight = kv_up.multiply(unit).t().unflatten(0, (-1, spec.nope_dim + spec.value_dim))
        key, value = weight.split([spec.nope_dim, spec.value_dim], dim=1)
        absorbed = (HeadMatrices.of(part, kernels.linear) for part in (key.mT, value))
        return cls(spec, kernels.add_rms_norm, query_norm, query_up, kv_norm, kv_up, *absorbed)

    def attend(
        self, plan: AttentionPlan, kv: PagedKV, index: int, projected: torch.Tensor, slots: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor], scores: Scores | None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention output [T, heads, value_dim]; writes the new vectors to `kv`. `projected` [T, n] is the
        first projection's: queries or latent queries, then latents and shared keys.
        """
        spec = self.spec
        sizes = [projected.shape[1] - spec.width, spec.rank, spec.rope_dim]
        first, latent, shared = torch.split(projected, sizes, dim=1)
        if self.query_up is not None:
            first = self.query_up.multiply(self._norm(first, self.query_norm))
        heads = first.reshape(len(first), -1, spec.key_dim)
        nope, rope = torch.split(heads, [spec.nope_dim, spec.rope_dim], dim=2)
        rotated = torch.cat([rope, shared[:, None]], dim=1)
        apply_rope(rotated, *angles, interleaved=spec.interleaved)
        rope, shared = rotated[:, :-1], rotated[:, -1]
        vectors = torch.cat([self._norm(latent, self.kv_norm), shared], dim=1)
        kv.write(index, slots, vectors[:, None])
        if plan.num_absorbed is None:
            return self._attend_absorbed(plan, kv, index, nope, rope, vectors, scores)
        output = projected.new_empty(len(projected), heads.shape[1], spec.value_dim)
        count = plan.num_absorbed
        if count:  # what this puts into rows of expanded chunks is replaced
            output[:count] = self._attend_absorbed(
                plan, kv, index, nope[:count], rope[:count], vectors[:count], scores
            )
        for chunk in plan.expanded:
            rows = chunk.span.rows
            query = torch.cat([nope[rows], rope[rows]], dim=2)
            output[rows] = self._attend_expanded(chunk, kv, index, query, vectors[rows], scores)
        return output

    def write(
        self, kv: PagedKV, index: int, projected: torch.Tensor, slots: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> None:  # fmt: skip
        """Only write the new vectors, as `attend` does."""
        latent, shared = torch.split(
            projected[:, -self.spec.width :], [self.spec.rank, self.spec.rope_dim], dim=1
        )
        rotated = shared[:, None].clone()
        apply_rope(rotated, *angles, interleaved=self.spec.interleaved)
        kv.write(index, slots, torch.cat([self._norm(latent, self.kv_norm), rotated[:, 0]], dim=1)[:, None])

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if self.add_rms_norm is not None and x.stride(1) == 1:
            normed: torch.Tensor = self.add_rms_norm.apply(x, None, weight, _NORM_EPS)
            return normed
        return F.rms_norm(x, x.shape[1:], weight, _NORM_EPS)

    def _attend_absorbed(
        self, plan: AttentionPlan, kv: PagedKV, index: int, nope: torch.Tensor, rope: torch.Tensor,
        vectors: torch.Tensor, scores: Scores | None,
    ) -> torch.Tensor:  # fmt: skip
        query, key = torch.cat([self.absorb_key.multiply(nope), rope], dim=2), vectors[:, None]
        mixed = attend(plan, kv, index, query, key, key[..., : self.spec.rank], scores)
        return self.absorb_value.multiply(mixed)

    def _attend_expanded(
        self, chunk: PrefillPlan, kv: PagedKV, index: int, query: torch.Tensor, vectors: torch.Tensor,
        scores: Scores | None,
    ) -> torch.Tensor:  # fmt: skip
        spec = self.spec
        seen = vectors if chunk.read is None else chunk.read.of(kv.keys[index])[0, :, 0]
        latent, shared = torch.split(seen, [spec.rank, spec.rope_dim], dim=1)
        both = (
            self.kv_up.multiply(latent.contiguous())
            .contiguous()
            .unflatten(1, (-1, spec.nope_dim + spec.value_dim))
        )
        own, values = torch.split(both, [spec.nope_dim, spec.value_dim], dim=2)
        keys = torch.cat([own, shared[:, None].expand(-1, own.shape[1], -1)], dim=2)
        return attend_chunk(chunk, query, keys, values, scores)
