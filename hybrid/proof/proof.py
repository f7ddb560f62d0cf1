"""The proof of a run: its gradient against the undivided network's, before the first step."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf, isfinite

import torch
from torch import Tensor, nn

from hybrid.data import Data, Dataset, Texts
from hybrid.errors import AgreedError
from hybrid.links import RankLinks
from hybrid.method.method import Method
from hybrid.method.objectives import LOSSES, MODEL
from hybrid.networks.local_init import remember_generators
from hybrid.networks.models import Chain
from hybrid.proof.passes import (
    ExactPasses,
    LatePasses,
    RankPass,
    has_rounding,
    lossless_method,
    run_pass,
    share_weights,
)
from hybrid.proof.samples import Samples, choose_batch
from hybrid.proof.undivided import (
    PROJECTIONS,
    PassResult,
    UndividedPass,
    UnprovenError,
    distance,
    rounded_weights,
    unlike,
)
from hybrid.ranks.machines import available_memory
from hybrid.solvers.objective import on_device

PASSED, SKIPPED = "passed", "skipped: "
UNCHECKED = "network, data and loss are this package's own"
ROUNDING_FACTOR = 30.0
"""Times the change by rounding the weights that passes may differ by."""
TOLERANCE = {torch.float64: (1e-8, 1e-10), torch.float32: (2e-4, 5e-6)}
"""By number format: the largest difference of a parameter's gradient, relative to its norm and to
the norm of the whole gradient. Sums over parts differ by about 1e-6, faults by 1e-3 and more."""
ROUNDED = 0.5, 0.05
"""The tolerance where numbers are rounded to 16 or 8 bits."""
CAUSES = (
    "a loss or a network that is no mean over samples (give denominator=, or train undivided, with "
    "1 micro-batch and 1 replica)",
    "code that reads modules or weights of other blocks, by hooks or attributes (give regularizer= "
    "for weights, or let the forward return what the loss needs)",
)
"""The usual causes of a difference; the first only where mini-batches are divided."""
STEP, ROUNDED_STEP = 2.0**-21, 2.0**-6
"""Between numbers of a format, by their size, times four: of float32, and of 16 and 8 bits."""


def prove(
    method: Method, links: RankLinks, data: Data, whole: Callable[[], nn.Module] | None
) -> str:
    r"""Compare a pass of this run with one of the undivided network, over the same samples.

        o_i = f(x_i; w),   G = d L(o_1 .. o_N, y) / d w              the network as it was given
        G'                 by the run's own blocks, links, micro-batches, replicas and formats
        ||G'_p - G_p|| <= e ||G_p|| + e' ||G||                       for every parameter p

    Norms are estimated by products with random signs, so a rank sends a few numbers for each
    tensor. Loss, buffers and attributes that count passes are compared, too. In both passes random
    operations give every row the same numbers. A method with late gradients makes its own passes,
    at equal weights. All ranks call it before they train, and nothing of it leaves a trace.

    Returns the entry of the summary. AgreedError with the first difference.
    """
    if method.options.train.verify == "never":
        return f"{SKIPPED}train.verify is never"
    if not is_checked(method, data):
        return SKIPPED + UNCHECKED
    if method.problem.blocks.pending is not None:
        return f"{SKIPPED}the weights are in files, and each rank reads those of its block"
    size = sum(p.nbytes for p in method.problem.blocks.model.parameters())
    room = inf
    with suppress(OSError, KeyError):  # of a system without /proc
        room = min(left for _, left in available_memory())
    if whole is not None and links.broadcast(size > room):
        return f"{SKIPPED}the undivided network has no room in the first rank's memory"
    restore, numerics = remember_generators(), _numerics()
    watch, links.watch = links.watch, None
    links.all_gather_grid(None)  # all have noted what the process has in common
    try:
        # no rounding that depends on shapes; attention's dropout draws as any other does
        _numerics(*[False] * len(numerics))
        result = _prove(method, links, data, whole)
    finally:
        restore()
        _numerics(*numerics)
        links.watch = watch
    links.all_gather_grid(None)  # nobody draws before all have set them back
    return result


def describe_proof(proof: str) -> list[str]:
    """Describe a proof for the first lines of a run; empty if none was needed."""
    if proof == PASSED:
        return ["its gradient is the undivided network's: a pass over a few samples was compared"]
    reason = proof.removeprefix(SKIPPED)
    return [] if reason == UNCHECKED else [f"its gradient was not proven: {reason}"]


def is_checked(method: Method, data: Data) -> bool:
    """Whether a run is compared: by default, if network, loss or data are the user's."""
    options = method.options
    loss = options.loss is None and options.train.loss in {*LOSSES} - {MODEL}
    plain = options.batch_transform is None and options.regularizer is None
    model = method.problem.blocks.model
    own = isinstance(data, Dataset | Texts) and loss and plain and isinstance(model, Chain)
    return {"never": False, "always": True, "auto": not own}[options.train.verify]


def _prove(
    method: Method, links: RankLinks, data: Data, whole: Callable[[], nn.Module] | None
) -> str:
    options, lossless = method.options, lossless_method(method)
    R = options.replicas if options.sync.exact else 1
    programs = [p for p in (ExactPasses(lossless), LatePasses(lossless)) if p.applies(method)]
    batch = choose_batch(lossless, data, max(p.parts for p in programs), R, links)
    samples = Samples.read([batch.of_replica(r, R) for r in range(R)], batch, method, links)
    model = None
    if links.place.number == 0:
        model = method.problem.blocks.model if whole is None else whole()
    if whole is None and not links.in_one_process:
        share_weights(method, links)
    for program in programs:
        reference = _refer(program, links, samples, model)
        if isinstance(reference, str):
            return SKIPPED + reference
        for formats in (False, True) if has_rounding(method) else (False,):
            share = samples.of_replica(links.place.replica if R > 1 else 0)
            ranks = run_pass(program, method, links, share, R, formats)
            fault = _compare(reference, ranks, method, formats) if ranks else ""
            if fault and model is not None:
                # once more beside what rounding alone can do to the gradient
                with rounded_weights(model, ROUNDED_STEP if formats else STEP):
                    rounded = _undivided_pass(program, samples, model).run(method.device)
                fault = _compare(reference, ranks, method, formats, rounded)
            if fault := links.broadcast(fault):
                raise AgreedError(_explain(fault, program, method, R, formats))
    return PASSED


def _undivided_pass(program: ExactPasses, samples: Samples, model: nn.Module) -> UndividedPass:
    method, options = program.method, program.method.options
    objective = method.problem.objectives.training
    loss = options.loss or getattr(objective.loss, "loss", objective.loss)
    together = options.train.sync_batchnorm and len(samples.shares) > 1
    return UndividedPass(
        model,
        on_device(loss, method.device),
        options.regularizer,
        samples.joined(method.problem.blocks.units[0].bundle, samples.inputs),
        samples.joined(objective.targets, samples.targets),
        samples.parts(program.parts, together),
    )


def _refer(
    program: ExactPasses, links: RankLinks, samples: Samples, model: nn.Module | None
) -> PassResult | str:
    """Make the undivided network's pass on the first rank; a text says why it cannot."""
    result, reason = PassResult(), ""
    with links.agreement():
        if model is not None:
            try:
                result = _undivided_pass(program, samples, model).run(program.method.device)
            except UnprovenError as error:
                reason = str(error)
            if not isfinite(result.loss):
                reason = "the loss of its samples is not a finite number"
    return links.broadcast(reason) or result


def _compare(
    reference: PassResult,
    ranks: Sequence[RankPass],
    method: Method,
    formats: bool,
    rounded: PassResult | None = None,
) -> str:
    """The first thing that differs, in words; empty: nothing.

    `rounded`: the reference at weights that differ from the network's by rounding.
    """
    rounded = rounded or reference
    if foreign := next((each.foreign for each in ranks if each.foreign), ""):
        return foreign
    dtype = next((p.dtype for p in method.problem.blocks.model.parameters()), torch.float32)
    dtype = min(dtype, reference.loss_format, key=lambda each: each.itemsize)
    near, floor = ROUNDED if formats else TOLERANCE.get(dtype, ROUNDED)
    weighed = [each.loss for each in ranks if each.loss is not None]
    loss = sum(value * weight for value, weight in weighed) / sum(weight for _, weight in weighed)
    bound = 0.2 * near * abs(reference.loss) + floor
    bound += ROUNDING_FACTOR * abs(rounded.loss - reference.loss)
    if not abs(loss - reference.loss) <= bound:
        return f"its loss is {loss:.6g}, and the undivided network's {reference.loss:.6g}"
    blocks = ranks[: len(method.problem.blocks)]
    here = {name: g for each in blocks for name, g in each.passed.gradients.items()}
    size = sum(float(g[0]) ** 2 for g in reference.gradients.values()) ** 0.5
    zero = torch.zeros(1 + PROJECTIONS, dtype=torch.float64)
    for name in dict.fromkeys([*reference.gradients, *here]):
        right = reference.gradients.get(name, zero)
        apart = distance(here.get(name, zero), right)
        bound = near * float(right[0]) + floor * size
        bound += ROUNDING_FACTOR * distance(rounded.gradients.get(name, zero), right)
        if name not in method.frozen and not apart <= bound:
            percent = min(1e6, 100 * apart / max(float(right[0]), 1e-30))
            return f"its gradient of {name!r} differs by {percent:.3g} %"
    if formats:
        return ""
    for each in blocks:
        for name, b in each.passed.buffers.items():
            right = reference.buffers.get(name, b)
            if not distance(b, right) <= near * float(right[0]) + floor:
                return f"the buffer {name!r} differs after the pass"
    for name, value in reference.attributes.items():
        found = [e.passed.attributes[name] for e in blocks if name in e.passed.attributes]
        other = next((x for x in found if unlike(x, value)), None if found else "as it was")
        if other is not None:
            shown = "" if isinstance(value, Tensor) else f": {other}, and {value} in a plain loop"
            return f"the attribute {name!r} differs after the pass{shown}"
    return ""


def _explain(fault: str, program: ExactPasses, method: Method, R: int, formats: bool) -> str:
    K, m = len(method.problem.blocks), program.parts
    said = f"the run would train another network than the one that was given: {fault}"
    if formats:
        return (
            f"{said} in the formats that are set, and is right in float32: choose "
            "train.precision=float32, or messages=float32"
        )
    parts = ((K, "block"), (m, "micro-batch"), (R, "replica"))
    how = ", ".join(f"{n} {what}{'es'[what[-1] != 'h' :] * (n > 1)}" for n, what in parts)
    causes = "; ".join(CAUSES if m * R > 1 else CAUSES[1:])
    return f"{said} ({how}); usual causes: {causes}"


def _numerics(*flags: bool) -> tuple[bool, ...]:
    """How a GPU computes, after it is set if flags are given: TF32, and fused attention."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    if flags:
        cudnn.allow_tf32, cuda.matmul.allow_tf32, flash, efficient, by_cudnn = flags
        cuda.enable_flash_sdp(flash)
        cuda.enable_mem_efficient_sdp(efficient)
        cuda.enable_cudnn_sdp(by_cudnn)
    fused = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    return cudnn.allow_tf32, cuda.matmul.allow_tf32, *fused
