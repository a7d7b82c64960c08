"""Every placement at a tiny size, and its equation in a second form: plain functions of the raw weights."""

import math
from functools import partial

import torch
import yaml

import normexp
from normexp import placements
from normexp.norms import Identity
from tests import tiny


def factory(name: str):
    """The class and fields of conf/placement/<name>.yaml."""
    node = yaml.safe_load((normexp.CONF / "placement" / f"{name}.yaml").read_text())
    fields = {field: value for field, value in node.items() if not field.startswith("_")}
    return partial(getattr(placements, node["_target_"].rpartition(".")[2]), **fields)


PLACEMENTS = {path.stem: factory(path.stem) for path in sorted((normexp.CONF / "placement").glob("*.yaml"))}
NORM_FREE = tuple(name for name, placement in PLACEMENTS.items() if placement.func.norm_free)
WITH_INIT = tuple(n for n, p in PLACEMENTS.items() if p.func.initial is not placements.Block.initial)


def cell(name: str, norm="ln"):
    """Norm and placement, as tiny.model and tiny.trainer take them."""
    return Identity if name in NORM_FREE else norm, PLACEMENTS[name]


def model(name: str, norm="ln", **changes):
    return tiny.model(*cell(name, norm), **changes)


@torch.no_grad()
def disturbed(module, seed: int = 0):
    """The same with gains, biases and scalars that differ from each other, so that none can stand for another."""
    source = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.ndim < 2:
            parameter += 0.3 * torch.randn(parameter.shape, generator=source).to(parameter.dtype)
    return module


class Raw:
    """The weights of a block, and the operations of the papers on them: nothing of normexp.layers or torch.nn."""

    def __init__(self, block, heads: int) -> None:
        self.weights = dict(block.named_parameters())
        self.heads, self.layer, self.depth = heads, block.layer, block.depth

    def w(self, name: str):
        return self.weights[name]

    def n(self, site: str, x):
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return normed * self.w(f"norm.{site}.weight") + self.w(f"norm.{site}.bias")

    def linear(self, name: str, x):
        return torch.einsum("...i,oi->...o", x, self.w(f"{name}.weight")) + self.w(f"{name}.bias")

    def split(self, x):
        """(B, T, C) -> (B, T, H, K)"""
        return torch.stack(x.split(x.shape[-1] // self.heads, dim=-1), dim=2)

    def rotate(self, x):
        """(B, T, H, K): pairs (i, i + K/2) as complex numbers, turned by t · 10000^(−2i/K)."""
        half = x.shape[-1] // 2
        angle = torch.outer(torch.arange(x.shape[1]), 10_000.0 ** (-torch.arange(half) / half)).to(x.dtype)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)

    def attend(self, x, heads=lambda name, x: x, rotated=lambda name, x: x, out=lambda x: x, scale=None):
        """`heads`: on each head in front of the rotary embedding; `rotated`: after it; `out`: in front of W_o."""
        q, k, v = (heads(name, self.split(self.linear(f"attn.{name}", x))) for name in "qkv")
        q, k = rotated("q", self.rotate(q)), rotated("k", self.rotate(k))
        scores = torch.einsum("bthk,bshk->bhts", q, k) * (scale or q.shape[-1] ** -0.5)
        future = torch.arange(x.shape[1])[None, :] > torch.arange(x.shape[1])[:, None]
        shares = scores.masked_fill(future, -math.inf).softmax(-1)
        return self.linear("attn.o", out(torch.einsum("bhts,bshk->bthk", shares, v).flatten(2)))

    def feed(self, x, pre=lambda x: x, hidden=lambda x: x):
        return self.linear("mlp.out", hidden(pre(self.linear("mlp.in", x)).clamp(min=0)))


def post(b: Raw, x):
    h = b.n("attn_residual", x + b.attend(x))
    return b.n("mlp_residual", h + b.feed(h))


def pre(b: Raw, x):
    h = x + b.attend(b.n("attn_in", x))
    return h + b.feed(b.n("mlp_in", h))


def deepnorm(b: Raw, x):
    alpha = math.sqrt(math.sqrt(2 * b.depth))
    h = b.n("attn_residual", x * alpha + b.attend(x))
    return b.n("mlp_residual", h * alpha + b.feed(h))


def peri(b: Raw, x):
    h = x + b.n("attn_branch", b.attend(b.n("attn_in", x)))
    return h + b.n("mlp_branch", b.feed(b.n("mlp_in", h)))


def reordered(b: Raw, x):
    h = x + b.n("attn_branch", b.attend(x))
    return h + b.n("mlp_branch", b.feed(h))


def subln(b: Raw, x):
    h = x + b.attend(b.n("attn_in", x), out=lambda y: b.n("attn_out", y))
    return h + b.feed(b.n("mlp_in", h), hidden=lambda y: b.n("mlp_hidden", y))


def normformer(b: Raw, x):
    def per_head(y):
        return torch.cat([c * head for c, head in zip(b.w("head_gain.weight"), y.chunk(b.heads, -1), strict=True)], -1)

    h = x + b.n("attn_branch", b.attend(b.n("attn_in", x), out=per_head))
    return b.w("residual_gain") * h + b.feed(b.n("mlp_in", h), hidden=lambda y: b.n("mlp_hidden", y))


def residual_dual(b: Raw, stream):
    x, d = stream
    attended = b.attend(x)
    h = b.n("attn_residual", x + attended)
    return b.n("mlp_residual", h + b.feed(h)), d + attended + b.feed(h)


def b2t(b: Raw, x):
    h = b.n("attn_residual", x + b.attend(x))
    return b.n("mlp_residual", x + h + b.feed(h))


def mixln(b: Raw, x):
    return post(b, x) if b.layer + 1 <= math.floor(b.depth / 4) else pre(b, x)


def lnscaling(b: Raw, x):
    h = x + b.attend(b.n("attn_in", x) / math.sqrt(1 + b.layer))
    return h + b.feed(b.n("mlp_in", h) / math.sqrt(1 + b.layer))


def hybrid(b: Raw, x):
    h = x + b.attend(x, heads=lambda name, y: b.n(f"{name}_head", y))
    return b.n("mlp_in", h) + b.feed(b.n("mlp_in", h))


def hybrid_star(b: Raw, x):
    if b.layer:
        return hybrid(b, x)
    h = x + b.attend(b.n("attn_in", x), heads=lambda name, y: b.n(f"{name}_head", y))
    return h + b.feed(b.n("mlp_in", h))


def keel(b: Raw, x):
    if b.layer == 0:
        h = x + b.attend(b.n("attn_in", x))
        return b.n("mlp_residual", h + b.feed(b.n("mlp_in", h)))
    h = b.n("attn_residual", 2 * b.depth * x + b.attend(b.n("attn_in", x)))
    return b.n("mlp_residual", 2 * b.depth * h + b.feed(b.n("mlp_in", h)))


def admin(b: Raw, x):
    h = b.n("attn_residual", b.w("omega.attn") * x + b.attend(x))
    return b.n("mlp_residual", b.w("omega.mlp") * h + b.feed(h))


def admin_fixed(b: Raw, x):
    omega = math.sqrt((2 * b.depth + 1) / math.log(2 * b.depth + 1) - 1)
    h = b.n("attn_residual", omega * x + b.attend(x))
    return b.n("mlp_residual", omega * h + b.feed(h))


def rezero(b: Raw, x):
    h = x + b.w("residual_weight") * b.attend(x)
    return h + b.w("residual_weight") * b.feed(h)


def tfixup(b: Raw, x):
    h = x + b.attend(x)
    return h + b.feed(h)


def ngpt(b: Raw, x):
    """As in the authors' code: stored parameters times init value over init scaling."""
    width, heads = x.shape[-1], b.heads

    def n(y):
        return y / y.square().sum(-1, keepdim=True).sqrt()

    def qk(name, y):
        return n(y) * (b.w("qk.weight") * (1.0 / width**-0.5)).reshape(heads, width // heads)

    def step(h, branch, rate):
        return n(n(h) + (rate * (0.05 / width**-0.5)).abs() * (n(branch) - n(h)))

    h = step(x, b.attend(x, rotated=qk, scale=math.sqrt(width / heads)), b.w("rate.attn.weight"))
    scaled = b.feed(h, pre=lambda y: y * b.w("preactivation.mlp_up.weight") * math.sqrt(width))
    return step(h, scaled, b.w("rate.mlp.weight"))


EQUATIONS = {
    "admin": admin, "admin_fixed": admin_fixed, "b2t": b2t, "deepnorm": deepnorm, "hybrid": hybrid,
    "hybrid_star": hybrid_star, "keel": keel, "lnscaling": lnscaling, "mixln": mixln, "ngpt": ngpt,
    "normformer": normformer, "peri": peri, "post": post, "pre": pre, "reordered": reordered,
    "residual_dual": residual_dual, "rezero": rezero, "sandwich": peri, "subln": subln, "tfixup": tfixup,
}  # fmt: skip
