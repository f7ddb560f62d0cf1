"""What a command imports: for help and wrong words no torch, for a training no compiler."""

import resource
import subprocess
import sys

import pytest

BUDGET_SECONDS = 0.7
PROGRAM = """
import sys
from hybrid.__main__ import main
try:
    main()
finally:
    print("heavy:", sorted({"torch", "mpi4py", "numpy"} & sys.modules.keys()), file=sys.stderr)
"""


def seconds_and_said(words):
    """Processor time, which other processes of this machine have no part in, and all output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--help",), "Commands:"),
        (("train", "--help"), "Example:"),
        (("train", "--modle", "x"), "No such option: --modle"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_needs_no_torch_comes_without_it_and_at_once(words, said):
    # the least of a few: a core that is shared with a busy neighbor counts slower, never faster
    for _ in range(4):
        seconds, output = seconds_and_said(words)
        assert said in output
        assert "heavy: []" in output
        if seconds < BUDGET_SECONDS:
            return
    pytest.fail(f"{seconds:.2f} s of processor time, the budget is {BUDGET_SECONDS} s")


def test_a_training_imports_no_compiler_and_leaves_it_as_it_is(tmp_path):
    """Not even with weights behind a cut; then a user compiles a step of an optimizer of torch."""
    program = f"""
import sys, torch
from hybrid.cli.app import main
words = "train --model resnet8 --epochs 1 --set data.limit=64 --set train.threads=1".split()
words += "--batch-size 32 --out {tmp_path / "run"}".split()
sys.argv = ["hybrid", *words]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended
heavy = "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy"
print("heavy:", [name for name in heavy if name in sys.modules])
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.5)

@torch.compile(backend="eager")
def step(x):
    (weight * x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

step(torch.ones(3))
optimizer.add_param_group({{"params": [torch.nn.Parameter(torch.ones(1))]}})
print("compiled:", weight.tolist(), len(optimizer.param_groups), "torch._dynamo" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "heavy: []" in done.stdout
    assert "compiled: [0.5, 0.5, 0.5] 2 True" in done.stdout
