"""Telemetry: metrics as pure functions of a frozen snapshot of one step, and the buffer that takes them to the host.

The model does not know that it is watched: gradients are read from `.grad`. A reading stays on the device until the
flush, which makes one transfer for all rows since the last one.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normexp.experts import plain_name
from normexp.fields import NonNegativeInt, PositiveInt


class Reading(NamedTuple):
    """What one metric read: a value for each path, still on the device."""

    paths: Sequence[str]
    values: Tensor  # (len(paths),) float32


@dataclass(frozen=True)
class TelemetryConfig:
    every: PositiveInt  # steps between two readings of the metrics
    dense_steps: NonNegativeInt  # the first steps, at which they are all read: collapse happens early
    flush_every: PositiveInt  # steps between two transfers to the host
    metrics: tuple[str, ...]  # names of the functions in METRICS

    def reads(self, step: int) -> bool:
        return bool(self.metrics) and (step <= self.dense_steps or step % self.every == 0)


class Layout:
    """The trainable parameters of a model, and the telemetry paths of their groups and matrices.

    A group is `embed`, `layer_00` …, `final_norm` or `head`, with every parameter in it; a matrix is a parameter of
    two or more dimensions, such as `layer_00/mlp.out`. `parameters` holds the matrices first, then the gains and
    biases, group by group; a flat vector of all of them is a row of segments, one for each matrix and one for the
    rest of each group.
    """

    def __init__(self, model: nn.Module) -> None:
        located = [(*locate(name), p) for name, p in model.named_parameters() if p.requires_grad]
        self.groups = list(dict.fromkeys(group for group, _, _ in located))
        matrices = [entry for entry in located if entry[2].ndim > 1]
        rest = {group: [p for g, _, p in located if g == group and p.ndim <= 1] for group in self.groups}
        self.parameters = [p for _, _, p in matrices] + [p for group in self.groups for p in rest[group]]
        by_shape: dict[torch.Size, list[int]] = {}
        for index, parameter in enumerate(self.parameters[len(matrices) :], len(matrices)):
            by_shape.setdefault(parameter.shape, []).append(index)
        self._stacks = list(by_shape.values())
        self._views = [p.detach().view(-1) for p in self.parameters]
        self.matrices = [f"{group}/{name}" for group, name, _ in matrices]
        out = [(group, i) for i, (group, name, _) in enumerate(matrices) if plain_name(name) == "mlp.out"]
        self.mlp_out = [[i for g, i in out if g == group] for group in dict(out)]  # one of each expert, block by block
        sizes = {group: sum(p.numel() for p in rest[group]) for group in self.groups}
        self.segments = [p.numel() for _, _, p in matrices] + [size for size in sizes.values() if size]
        owners = [group for group, _, _ in matrices]
        by_parameter = owners + [group for group in self.groups for _ in rest[group]]
        by_segment = owners + [group for group, size in sizes.items() if size]
        device = self.parameters[0].device
        stacked = [*range(len(matrices)), *(index for stack in self._stacks for index in stack)]
        self._unstacked = torch.tensor(stacked, device=device).argsort()
        self._parameter_owner = torch.tensor([self.groups.index(group) for group in by_parameter], device=device)
        self._segment_owner = torch.tensor([self.groups.index(group) for group in by_segment], device=device)
        self.sizes = torch.tensor(self.segments[: len(matrices)], device=device)  # elements of each matrix

    def gradients(self) -> list[Tensor]:
        """Of each parameter, 0 where it took no part."""
        return [torch.zeros_like(p) if (own := p.grad) is None else own for p in self.parameters]

    def gradient_norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """`l2_norms` to the bit, but gains and biases of one shape are one operation."""
        stacks = [torch.stack([gradients[index] for index in stack]).view(len(stack), -1) for stack in self._stacks]
        norms = [torch.linalg.vector_norm(stack, dim=1, dtype=torch.float32) for stack in stacks]
        return torch.cat([l2_norms(gradients[: len(self.matrices)]), *norms])[self._unstacked]

    def flat_parameters(self) -> Tensor:
        """A copy of all parameters as one vector: an operation on it is one kernel, not a hundred."""
        return torch.cat(self._views)

    def norms(self, flat: Tensor) -> Tensor:
        """‖·‖₂ of each group, and then of each matrix, of a flat vector: the values of `paths`."""
        return self._by_path(l2_norms(torch.split(flat, self.segments)), self._segment_owner)

    def collect(self, norms_P: Tensor) -> Tensor:
        """The same, of the norms of each parameter."""
        return self._by_path(norms_P, self._parameter_owner)

    def _by_path(self, norms: Tensor, owner: Tensor) -> Tensor:
        squares = norms.new_zeros(len(self.groups)).index_add_(0, owner, norms.square())
        return torch.cat([squares.sqrt(), norms[: len(self.matrices)]])

    def paths(self, metric: str) -> list[str]:
        """metric/group, …, metric/group/matrix, …"""
        return [f"{metric}/{name}" for name in self.groups + self.matrices]


def locate(name: str) -> tuple[str, str]:
    """`blocks.3.mlp.out.weight` -> (`layer_03`, `mlp.out`); `embed.token.weight` -> (`embed`, `token`);
    `head.weight` -> (`head`, `weight`). Of a module, `final_norm` -> (`final_norm`, ``)."""
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    group, _, rest = (f"layer_{int(block[1]):02d}", ".", block[2]) if block else name.partition(".")
    return group, re.sub(r"\.weight$", "", rest)


def l2_norms(tensors: Sequence[Tensor]) -> Tensor:
    """‖·‖₂ of each tensor as one float32 vector."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32))


@dataclass(frozen=True)
class Snapshot:
    """One step of training, seen after the optimiser's step; all in the order of `layout.parameters`."""

    layout: Layout
    parameter_gradient_norms: Tensor  # (P,) after accumulation, unscaling and all-reduce, before clipping
    gradients: list[Tensor]  # as the optimiser saw them
    before: Tensor  # the parameters before the step, flat
    change: Tensor  # of the parameters by the step, flat
    second_moments: list[Tensor] | None  # Adam's v after the step; None for an optimiser without
    eps: float  # Adam's

    @cached_property
    def gradient_norms(self) -> Tensor:
        return self.layout.collect(self.parameter_gradient_norms)

    @cached_property
    def weight_norms(self) -> Tensor:
        return self.layout.norms(self.before)


def grad_norm(s: Snapshot) -> Reading:
    """‖∂L/∂W‖₂ per matrix and per block."""
    return Reading(s.layout.paths("grad_norm"), s.gradient_norms)


def weight_norm(s: Snapshot) -> Reading:
    """‖W‖₂ per matrix and per block, before the step."""
    return Reading(s.layout.paths("weight_norm"), s.weight_norms)


def update_ratio(s: Snapshot) -> Reading:
    """‖ΔW‖₂ / ‖W‖₂ per matrix and per block: about 1e-3 is healthy."""
    return Reading(s.layout.paths("update_ratio"), s.layout.norms(s.change) / s.weight_norms)


def rms_t(s: Snapshot) -> Reading:
    """√mean(g² / max(v, ε²)) per matrix, g in v already: at most 1/√(1 − β₂) (2304.13013). Empty without Adam."""
    if s.second_moments is None:
        return Reading([], s.before[:0])
    matrices = slice(len(s.layout.matrices))
    shares = torch._foreach_div(s.gradients[matrices], torch._foreach_clamp_min(s.second_moments[matrices], s.eps**2))
    torch._foreach_mul_(shares, s.gradients[matrices])  # g² / v without a square root, which takes longest of all
    sums = torch.stack([share.sum(dtype=torch.float32) for share in shares])
    return Reading([f"rms_t/{name}" for name in s.layout.matrices], (sums / s.layout.sizes).sqrt())


def layer_ratio(s: Snapshot) -> Reading:
    """First over last block's gradient norm of W₂, of all experts' together: below 0.05 is a sign of Post-LN's
    collapse."""
    matrices = s.gradient_norms[len(s.layout.groups) :]
    first, last = (torch.linalg.vector_norm(matrices[s.layout.mlp_out[block]]) for block in (0, -1))
    return Reading(["layer_ratio"], (first / last).unsqueeze(0))


METRICS: Mapping[str, Callable[[Snapshot], Reading]] = {
    "grad_norm": grad_norm,
    "weight_norm": weight_norm,
    "update_ratio": update_ratio,
    "rms_t": rms_t,
    "layer_ratio": layer_ratio,
}


class Observed:
    """What modules saw in their last forward pass, such as a router its load: a module with an optional method
    `observed() -> {metric: value}` gives the paths metric/layer_00/mlp, and for several numbers …/mlp.0, …"""

    def __init__(self, model: nn.Module) -> None:
        named = [(name, module) for name, module in model.named_modules() if hasattr(module, "observed")]
        self._sources = [("/".join(filter(None, locate(name))), module.observed) for name, module in named]

    def read(self) -> list[Reading]:
        return [
            Reading(_elements(f"{metric}/{place}", value), value.detach().float().flatten())
            for place, observed in self._sources
            for metric, value in observed().items()
        ]


def _elements(path: str, value: Tensor) -> list[str]:
    return [f"{path}.{index}" for index in range(value.numel())] if value.ndim else [path]


class Buffer:
    """Rows of host numbers and device vectors; `flush` brings all of them to the host in one transfer."""

    def __init__(self) -> None:
        self._rows: list[tuple[dict[str, float], list[Reading]]] = []

    def add(self, host: dict[str, float], device: list[Reading]) -> None:
        self._rows.append((host, device))

    def flush(self) -> list[dict[str, float]]:
        rows, self._rows = self._rows, []
        vectors = [reading.values for _, readings in rows for reading in readings]
        values = iter(torch.cat(vectors).tolist() if vectors else [])
        for row, readings in rows:
            for reading in readings:
                own = itertools.islice(values, reading.values.numel())
                row.update(zip(reading.paths, own, strict=True))
        return [row for row, _ in rows]
