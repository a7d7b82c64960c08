"""The fused kernels as operations of PyTorch: autograd, torch.compile, checkpointing, scaling, sharding.

Interpreted like `test_kernels_interpreted.py`, run by `test_kernels.py` in the same way, and on a device when marked.
"""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch.testing._internal.logging_tensor import LoggingTensor
from torch.utils.checkpoint import checkpoint

from normexp import kernels
from tests.kernel_cases import DEVICE, INTERPRETED, OPS, call, check_refusals, evaluate
from tests.kernel_device import case

pytest.importorskip("triton")
if not INTERPRETED:
    pytestmark = pytest.mark.gpu

from normexp.kernels import fused

float16, float32, float64 = torch.float16, torch.float32, torch.float64
OPERATIONS = {  # residual's type, weight, bias, centre
    "rms_norm": (None, True, False, False),
    "layer_norm": (None, True, True, True),
    "layer_norm without parameters": (None, False, False, True),
    "add_rms_norm": (torch.bfloat16, True, False, False),
    "add_layer_norm": (float32, True, True, True),
}


@pytest.fixture(autouse=True)
def here():
    with torch.device(DEVICE):
        yield


def operands(residual_dtype, weight, bias, centre, dtype=torch.bfloat16):
    def tensor(*size, kind=dtype):
        return torch.randn(size).to(kind).requires_grad_()

    residual = None if residual_dtype is None else tensor(4, 5, 24, kind=residual_dtype)
    parameters = tensor(24, kind=float32) if weight else None, tensor(24, kind=float32) if bias else None
    return tensor(4, 5, 24), residual, *parameters, 1e-5, 0.0, centre, False


@pytest.mark.parametrize("name", OPERATIONS)
def test_opcheck_of_the_forward(name):
    torch.library.opcheck(torch.ops.normexp.norm.default, operands(*OPERATIONS[name]))


@pytest.mark.parametrize("name", OPERATIONS)
def test_opcheck_of_the_backward(name):
    with torch.no_grad():
        x, residual, weight, bias, eps, offset, centre, _ = operands(*OPERATIONS[name])
        y, total, mean, rstd = torch.ops.normexp.norm(x, residual, weight, bias, eps, offset, centre, False)
        dtotal, saved = (None, x) if residual is None else (torch.randn_like(total), total)
        arguments = (torch.randn_like(y), dtotal, saved, weight, mean if centre else None, rstd, offset, x.dtype)
        bias_type = None if bias is None else bias.dtype
        for want_dx in True, False:
            torch.library.opcheck(
                torch.ops.normexp.norm_backward.default, (*arguments, want_dx, weight is not None, bias_type)
            )


@pytest.mark.parametrize("op", OPS)
def test_first_and_second_derivatives_in_float64(op):
    made = case(op, (3, 5), float64, eps=1e-3, gain_offset=0.5)
    leaves = [tensor.requires_grad_() for tensor in made.tensors().values()]

    def function(*tensors):
        named = dict(zip(made.tensors(), tensors, strict=True))
        return call(made, "triton", named["x"], named.get("residual"), named["weight"], named.get("bias"))

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_a_gradient_penalty_is_the_formulas():
    """dy that needs no gradient, x that does: the case in which a once-differentiable function is silently wrong."""
    penalties = {}
    for kernel in "triton", "torch":
        x = torch.linspace(-2, 3, 24).reshape(3, 8).requires_grad_()
        y = kernels.rms_norm(x, None, 1e-6, cast="input", kernel=kernel)
        (dx,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
        dx.square().sum().backward()
        penalties[kernel] = x.grad
    torch.testing.assert_close(penalties["triton"], penalties["torch"])


class Block(torch.nn.Module):
    """A Pre-Norm sublayer with the fused add: s = x + r; s + F(norm(s))."""

    def __init__(self, dtype=float32):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.ones(24)), torch.nn.Parameter(torch.zeros(24))
        self.linear = torch.nn.Linear(24, 24, dtype=dtype)

    def forward(self, x, residual):
        y, total = kernels.add_layer_norm(x, residual, self.weight, self.bias, 1e-5, cast="input", kernel="triton")
        y = kernels.rms_norm(torch.relu(self.linear(y)), self.weight, 1e-6, cast="input", kernel="triton")
        return y + total


def gradients(module, *inputs):
    for parameter in module.parameters():
        parameter.grad = None
    module(*inputs).square().sum().backward()
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_block_is_one_graph(backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    block = Block()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for shape in (6, 24), (9, 24), (2, 3, 5, 24):
        x, residual = torch.randn(shape), torch.randn(shape)
        for ours, eager in zip(gradients(compiled, x, residual), gradients(block, x, residual), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    names = [[str(node.target) for node in graph.graph.nodes] for graph in counter.graphs]
    fused = [sum("normexp" in name for name in graph) for graph in names if graph]
    assert fused == [2, 2]  # one graph for each number of dimensions, not for each number of rows


def test_the_compiled_backward_is_the_fused_one():
    """Were it the formula's, one graph would still be one graph."""
    graphs = {"forward": [], "backward": []}

    def keep(which):
        def compiler(graph, inputs):
            graphs[which].append([str(node.target) for node in graph.graph.nodes])
            return make_boxed_func(graph)

        return compiler

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    block = Block()
    gradients(torch.compile(block, fullgraph=True, backend=backend), torch.randn(6, 24), torch.randn(6, 24))
    ((forward,), (backward,)) = graphs["forward"], graphs["backward"]
    assert [forward.count(f"normexp.{name}.default") for name in ("norm", "norm_backward")] == [2, 0]
    assert [backward.count(f"normexp.{name}.default") for name in ("norm", "norm_backward")] == [0, 2]
    assert not [name for name in forward + backward if "rsqrt" in name]


def test_the_fake_operation_allocates_like_the_real_one():
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = torch.ops.normexp.norm(*operands(*OPERATIONS["add_layer_norm"]))
    with FakeTensorMode():
        fake = torch.ops.normexp.norm(*operands(*OPERATIONS["add_layer_norm"]))
        x = torch.randn(2, 24, requires_grad=True)
        kernels.rms_norm(x, None, 1e-6, cast="input", kernel="triton").sum().backward()
        assert x.grad.shape == x.shape
    for ours, theirs in zip(fake, real, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(use_reentrant):
    block, x, residual = Block(), torch.randn(6, 24, requires_grad=True), torch.randn(6, 24)

    def again(*inputs):
        return checkpoint(block, *inputs, use_reentrant=use_reentrant)

    again.parameters = block.parameters
    for ours, plain in zip(gradients(again, x, residual), gradients(block, x, residual), strict=True):
        assert torch.equal(ours, plain)


def test_float16_autocast_and_a_scaler():
    """Under autocast the projections give float16; the norm keeps it, with float32 parameters and their gradients."""
    block, scaler = Block(), torch.amp.GradScaler(DEVICE, init_scale=2.0**8)
    optimiser = torch.optim.SGD(block.parameters(), lr=0.1)
    x, residual = torch.randn(6, 24), torch.randn(6, 24)
    plain = gradients(block, x, residual)
    block.zero_grad()
    with torch.autocast(DEVICE, dtype=float16):
        loss = block(x, residual).square().sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimiser)
    for ours, expected in zip([p.grad for p in block.parameters()], plain, strict=True):
        assert ours.dtype == float32
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)  # float16: 11 bits, six rows summed


def test_transforms_of_torch_func_are_refused():
    """All of them: vmap would run row by row, and the tangent of jvp would be 0 without a word."""

    def norm(x):
        return kernels.rms_norm(x, None, 1e-6, cast="input", kernel="triton")

    x = torch.randn(3, 24)
    for transform in (
        lambda: torch.func.grad(lambda x: norm(x).sum())(x),
        lambda: torch.func.vmap(norm)(x),
        lambda: torch.func.jvp(norm, (x,), (x,)),
        lambda: torch.func.vjp(norm, x),
    ):
        with pytest.raises(RuntimeError, match=r"torch\.func does not see through the fused norms"):
            transform()


def test_a_parameter_may_have_a_stride():
    made = case("layer_norm", (3, 24))
    strided = replace(made, weight=made.weight.repeat_interleave(2)[::2], bias=made.bias.repeat_interleave(2)[::2])
    found, expected = evaluate(strided, "triton"), evaluate(made, "triton")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("op", OPS)
def test_wrong_operands_are_refused_before_they_are_read(op):
    check_refusals(case(op, (3, 24), torch.bfloat16), "triton")


def test_a_subclass_among_the_operands_is_seen(monkeypatch):
    """It may hold its values anywhere, so it is asked through the operation, and no address is taken of it."""
    made = case("add_layer_norm", (3, 24))
    expected = evaluate(made, "triton")["y"]
    monkeypatch.setattr(fused, "Norm", None)
    for name in "x", "residual", "weight", "bias":
        other = {name: LoggingTensor(getattr(made, name))}
        y, _ = call(made, "triton", *(other.get(n, getattr(made, n)) for n in ("x", "residual", "weight", "bias")))
        assert torch.equal(y.elem, expected)


@pytest.fixture
def mesh(tmp_path):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh

    backend = "gloo" if DEVICE == "cpu" else "nccl"
    init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,))
    destroy_process_group()


def test_fully_sharded_parameters(mesh):
    """FSDP2 hands the module plain tensors, gathered from its DTensors, inside forward and backward."""
    from torch.distributed.fsdp import fully_shard

    block, x, residual = Block(), torch.randn(6, 24), torch.randn(6, 24)
    plain = gradients(block, x, residual)
    sharded = gradients(fully_shard(block, mesh=mesh), x, residual)
    for ours, expected in zip(sharded, plain, strict=True):
        torch.testing.assert_close(ours.full_tensor(), expected)


@pytest.mark.parametrize("kernel", ["triton", "torch"])
def test_distributed_beside_plain_tensors_are_refused(mesh, kernel):
    """Their address is not that of the values."""
    from torch.distributed.tensor import distribute_tensor

    made = case("add_layer_norm", (3, 24))
    for name in "x", "residual", "weight", "bias":
        other = {name: distribute_tensor(getattr(made, name), mesh)}
        with pytest.raises(TypeError, match="distribute both, or neither"), torch.no_grad():
            call(made, kernel, *(other.get(n, getattr(made, n)) for n in ("x", "residual", "weight", "bias")))


def test_the_fused_module_is_what_ran(monkeypatch):
    seen = []
    forward = fused.norm_forward
    monkeypatch.setattr(fused, "norm_forward", lambda *a: seen.append(a) or forward(*a))
    evaluate(case("rms_norm", (3, 24)), "triton")
    assert len(seen) == 1
