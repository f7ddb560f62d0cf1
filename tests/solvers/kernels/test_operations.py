"""The fused kernels, executed, equal the same mathematics in torch on random inputs.

Their source runs on the CPU, thread by thread; with `-m gpu` the same tests run it on the GPU.
"""

import shutil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import make_problem, recorded

from hybrid.solvers import AugmentedLagrangian, BlockADMM, Penalty
from hybrid.solvers.kernels.launcher import CupyLauncher, set_launcher
from hybrid.solvers.kernels.operations import couple, step, step_limit
from hybrid.solvers.layers.projection import Box, Free, NonNegative, Quantized, Sign
from tests.solvers.kernels.kernels_on_cpu import (
    NAMES,
    SOME,
    CpuLauncher,
    build,
    compiled,
    instantiated,
)

ARCHITECTURES = (80, 90)
FORMATS = (torch.float32, torch.float16, torch.bfloat16)
EPSILON = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
HELD = [None, Free(), NonNegative(), Box(-0.5, 0.75), Quantized(3, -1.0, 1.0), Sign()]


@pytest.fixture(scope="session")
def library():
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the kernels with")
    return build()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def on(request):
    """Who runs the kernels: an emulation on the CPU, or the GPU."""
    if request.param == "cpu":
        return CpuLauncher(request.getfixturevalue("library"))
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return CupyLauncher()


def fused(on, compute, *arguments, **named):
    before = set_launcher(on)
    try:
        return compute(*arguments, **named)
    finally:
        set_launcher(before)


def close(found, wanted, scale=1.0):
    """As close as rounding at other places of the same sum lets them be."""
    if found is None or wanted is None:
        assert found is wanted
        return
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    e = EPSILON[found.dtype] if found.dtype.is_floating_point else 0.0
    torch.testing.assert_close(found, wanted, rtol=4 * e, atol=4 * e * scale)


@st.composite
def images(draw, factors=(1, 2, 3)):
    """A shape, its layout and formats, and where in memory tensors begin."""
    factor = draw(st.sampled_from(factors))
    height, width = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return {
        "shape": (draw(st.integers(1, 4)), draw(st.integers(1, 35)), height, width),
        "factor": factor,
        "last": draw(st.booleans()),
        "formats": (draw(st.sampled_from(FORMATS)), draw(st.sampled_from(FORMATS))),
        "shift": draw(st.integers(0, 5)),
        "seed": draw(st.integers(0, 99)),
    }


class Tensors:
    """Random tensors of a case; `big` ones have the pixels before the filter."""

    def __init__(self, case, device):
        self.case, self.device = case, device
        self.random = torch.Generator().manual_seed(case["seed"])

    def __call__(self, dtype, big=False):
        n, c, h, w = self.case["shape"]
        times = self.case["factor"] if big else 1
        shape = (n, c, h * times, w * times)
        values = torch.randn(shape, generator=self.random)
        if self.case["last"]:
            values = values.contiguous(memory_format=torch.channels_last)
        # at any address, aligned or not
        memory = torch.empty(values.numel() + 5, dtype=dtype, device=self.device)
        made = memory[self.case["shift"] :][: values.numel()].as_strided(shape, values.stride())
        return made.copy_(values)


@given(images(), st.booleans(), st.sampled_from([1, 3, 128]))
def test_coupling(on, case, multipliers, samples):
    x_format, lam_format = case["formats"]
    tensors = Tensors(case, on.device_type)
    x, lam = tensors(x_format, big=True), tensors(lam_format)
    kappa = tensors(lam_format) if multipliers else None
    arguments = x, lam, kappa, 0.3, case["factor"], samples
    found, wanted = fused(on, couple, *arguments), couple(*arguments)
    close(found.p_out, wanted.p_out)
    assert found.p_out.stride() == x.stride() or 1 in x.shape
    size = float(wanted.squares.sum())
    close(found.squares, wanted.squares, size)
    close(found.loss, wanted.loss, size)


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 3]), st.floats(1e-3, 10), st.booleans())
def test_the_adjoint_is_the_derivative_of_the_loss_and_squares_are_of_what_is_filtered(
    seed, factor, beta, multiplied
):
    random = torch.Generator().manual_seed(seed)
    shapes = (2, 3, 2 * factor, 4 * factor), (2, 3, 2, 4), (2, 3, 2, 4)
    x, lam, kappa = (torch.randn(s, dtype=torch.float64, generator=random) for s in shapes)
    x.requires_grad_()
    y = torch.nn.functional.avg_pool2d(x, factor)
    loss = beta * ((lam - y) ** 2).sum() + multiplied * (kappa * (lam - y)).sum()
    (expected,) = torch.autograd.grad(loss, x)
    found = couple(x.detach(), lam, kappa if multiplied else None, beta, factor)
    torch.testing.assert_close(found.p_out, expected)
    torch.testing.assert_close(found.loss, loss.detach())
    squares = torch.stack([(lam - y).norm() ** 2, y.norm() ** 2])
    torch.testing.assert_close(found.squares, squares.detach())


@given(images(factors=(1,)), st.booleans(), st.sampled_from(HELD))
def test_step_of_lam_and_kappa(on, case, multipliers, constraint):
    x_format, lam_format = case["formats"]
    tensors = Tensors(case, on.device_type)
    lam, x, p_in = tensors(lam_format), tensors(x_format), tensors(torch.float32)
    kappa = tensors(lam_format) if multipliers else None
    arguments = lam, x, kappa, p_in, 0.3, 0.2, 0.45
    found = fused(on, step, *arguments, constraint=constraint)
    wanted = step(*arguments, constraint=constraint)
    jump = {Quantized: 2 / 7, Sign: 2.0}.get(type(constraint), 0.0)
    if jump:
        # a value on the edge between two may go to either
        away = (found.lam.float() - wanted.lam.float()).abs()
        assert (away > 0.5 * jump).float().mean() <= 0.02
        return
    close(found.lam, wanted.lam)
    close(found.shared, wanted.shared)
    close(found.kappa, wanted.kappa)
    # of the rounded values, which may differ by a rounding
    residual = EPSILON[lam_format] * x.numel()
    close(found.squares, wanted.squares, float(wanted.squares.sum()) + residual / 1e-6)


@given(images(factors=(1, 2)), st.sampled_from([0.1, 0.5, 1.0]))
def test_limit_of_the_step(on, case, rate):
    x_format, lam_format = case["formats"]
    tensors = Tensors(case, on.device_type)
    lam, p_in = tensors(lam_format, big=True), tensors(torch.float32, big=True)
    arguments = lam, tensors(x_format), tensors(lam_format), p_in, 0.3, rate, case["factor"]
    found, wanted = fused(on, step_limit, *arguments), step_limit(*arguments)
    close(found.lam, wanted.lam)
    close(found.shared, wanted.shared)
    close(found.kappa, wanted.kappa)
    close(found.squares, wanted.squares, float(wanted.squares.sum()))


@pytest.mark.parametrize("size", [1, 255, 256, 257, 5000])
def test_sums_are_the_same_bits_every_time_and_over_many_blocks(on, size):
    x, lam = torch.randn(2, size, 1, device=on.device_type)
    first = fused(on, couple, x, lam, None, 1.0)
    again = fused(on, couple, x, lam, None, 1.0)
    assert torch.equal(first.squares, again.squares)
    exact = (lam.double() - x.double()).square().sum()
    torch.testing.assert_close(first.squares[0].double(), exact, rtol=1e-6, atol=0)


def specials(dtype):
    """Every value of a 16-bit format; of float32 those around its ends and the narrow ones'."""
    if dtype is not torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    ends = [0.0, 65504.0, 65519.9, 65520.0, 2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 3e38]
    values = torch.tensor([*ends, float("inf"), float("nan"), 1 + 2.0**-11, 1 + 3 * 2.0**-11])
    random = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).to(torch.int32)
    return torch.cat((values, -values, random.view(torch.float32)))


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_number_formats_round_as_torch_does(on, source, target):
    """The limit of a step converts x to lam's format.

    But for float32's subnormals, bfloat16's among them: kernels take those for zeros.
    """
    x = specials(source)
    x = x[(x.float().abs() >= 2.0**-126) | (x == 0) | x.isnan()]
    zeros = torch.zeros(len(x), dtype=target, device=on.device_type)
    p_in = torch.zeros(len(x), device=on.device_type)
    found = fused(on, step_limit, zeros, x.to(on.device_type), zeros, p_in, 0.0, 1.0).lam.cpu()
    wanted = x.float().to(target)
    assert ((found == wanted) | (found.isnan() & wanted.isnan())).all()


def test_float64_asks_torch(library):
    on = CpuLauncher(library)
    x = torch.rand(2, 6, 4, 4)
    fused(on, couple, x.double(), x.double(), None, 1.0)
    assert on.started == []


TRAINED: dict[str, tuple[Any, set[str]]] = {
    "penalty": (Penalty(), {"couple", "step", "finish"}),
    "augmented-lagrangian": (AugmentedLagrangian(), {"couple", "limit", "finish"}),
    "augmented-lagrangian, steps": (
        AugmentedLagrangian(lam_move="step"),
        {"couple", "step", "finish"},
    ),
    "filtered, in 16 bits": (
        AugmentedLagrangian(lam_move="step", filter=2, storage="bfloat16"),
        {"couple", "finish"},
    ),
    "block-admm": (BlockADMM(rho=0.1, constraint="box:-1:1"), {"couple", "step", "finish"}),
}


@pytest.mark.parametrize("name", TRAINED)
def test_sub_problems_are_solved_by_these_kernels_as_by_torch(library, name):
    solver, kernels = TRAINED[name]

    def weights():
        problem = make_problem(3, units=3, cuts=[2], batch=4, batches=3).single_precision()

        def program(block, links):
            mine = recorded(problem, solver, block, links, 4)
            stats = mine.train(problem.window(4))
            residuals = [stats.residual(), *(stats.residual_norms() or ())]
            return dict(block.module.state_dict()), residuals

        return problem.on_every_block(program)

    on = CpuLauncher(library)
    for (mine, residuals), (plain, wanted) in zip(fused(on, weights), weights(), strict=True):
        for key in plain:
            torch.testing.assert_close(mine[key], plain[key], rtol=2e-3, atol=2e-4)
        assert residuals == pytest.approx(wanted, rel=0.02)
    assert {kernel.partition("<")[0] for kernel in on.started} == kernels


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [SOME, pytest.param(NAMES, marks=pytest.mark.slow)], ids=len)
def test_every_kernel_compiles_for_both_architectures(names):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc to compile the kernels with")
    for_gpus = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in ARCHITECTURES]
    flags = ("-std=c++17", "-fatbin", "--no-compress", "-t2", "-Xptxas=-O0", "-Werror=all-warnings")
    binary = compiled(instantiated(names), "nvcc", *flags, *for_gpus).read_bytes()
    assert all(name.partition("<")[0].encode() in binary for name in NAMES)
