"""The state of any optimizer, known from a trial step and saved as tensors; weight averages."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)

NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}

SPARSE = "gradients must be dense for clipping, decay, ties and replicas: leave sparse=True out"


def restrict_to(parameters: Sequence[Tensor], optimizer: AnyOptimizer) -> AnyOptimizer:
    """Make an optimizer that steps only these parameters, and shares their state.

    Its groups are copies: setting a learning rate there does not change the original.
    """
    ids = {id(p) for p in parameters}
    groups = optimizer.param_groups
    restricted = [
        {**group, "params": [p for p in group["params"] if id(p) in ids]} for group in groups
    ]
    return with_groups(restricted, optimizer)


def with_groups(groups: list[dict[str, Any]], optimizer: AnyOptimizer) -> AnyOptimizer:
    """Make an optimizer of other groups that shares the state."""
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer), param_groups=groups)
    return copy


def clone_optimizer(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
) -> torch.optim.Optimizer:
    """Construct an optimizer of the same class with other parameter groups.

    ValueError if its arguments are not all among the class's defaults or the object's attributes.
    """
    kind: Callable[..., torch.optim.Optimizer] = type(optimizer)
    names = inspect.signature(kind).parameters
    known = vars(optimizer) | optimizer.defaults
    arguments = {k: v for k, v in known.items() if k in names}
    try:
        return kind([dict(group) for group in groups], **arguments)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"another {kind.__name__} cannot be made from the parameter groups of one ({error}): "
            "let its class put all arguments of __init__ into its defaults or its attributes"
        ) from None


def with_momentum(optimizer: torch.optim.Optimizer, momentum: float) -> torch.optim.Optimizer:
    """Construct the same optimizer with another momentum, or beta_1; ValueError without either."""
    groups = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        group["separate_momentum"] = True
        if "momentum" in group:
            group["momentum"] = momentum
            if "nesterov" in group:
                group["nesterov"] = group["nesterov"] and momentum > 0
        elif "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        else:
            raise ValueError(
                f"solver.momentum is {momentum:g}, but the optimizer {type(optimizer).__name__} "
                "has no momentum: leave it out, or take an optimizer.name that has one"
            )
    return clone_optimizer(optimizer, groups)


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[nn.Parameter]:
    """Iterate over the parameters of optimizers."""
    return (p for o in optimizers for group in o.param_groups for p in group["params"])


def check_dense(gradients: list[Tensor]) -> None:
    """Reject sparse gradients."""
    if any(gradient.is_sparse for gradient in gradients):
        raise ValueError(f"a gradient is sparse, as embeddings with sparse=True have it: {SPARSE}")


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any parameter of an optimizer has a gradient."""
    return any(p.grad is not None for p in parameters_of([optimizer]))


def optimizer_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the state of a parameter after a trial step: slot -> tensor, number or None.

    The trial steps a parameter of the same shape and device. The state is empty if the optimizer
    does not have the parameter. ValueError for a state that a checkpoint cannot hold.
    """
    groups = optimizer.param_groups
    group = next((g for g in groups if any(p is parameter for p in g["params"])), None)
    if group is None:
        return {}
    stand_in = nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(stand_in)
    trial = clone_optimizer(optimizer, [{**group, "params": [stand_in]}])
    trial.step()
    state, name = dict(trial.state.get(stand_in, {})), type(optimizer).__name__
    for slot, value in flat(state).items():
        if value is not None and type(value) not in {Tensor, nn.Parameter, *NUMBERS}:
            raise ValueError(
                f"{name} keeps {slot} of a parameter, a {type(value).__name__}, and a checkpoint "
                "holds numbers, plain tensors and what __tensor_flatten__ makes them: keep it so"
            )
    if before := _contexts(state):
        stand_in.grad = torch.ones_like(stand_in)
        trial.step()
        if _contexts(trial.state[stand_in]) != before:
            raise ValueError(
                f"{name} changes what its {', '.join(before)} of a parameter have beside the "
                "tensors of __tensor_flatten__, which a checkpoint holds: keep it in tensors"
            )
    stepped = trial.param_groups[0]
    for key, value in group.items():
        if key != "params" and stepped[key] is not value and stepped[key] != value:
            raise ValueError(
                f"{name} changes {key!r} of a parameter group as it steps, and a checkpoint holds "
                "what is kept of single parameters: keep it in the state of each"
            )
    return state


def _contexts(state: Mapping[str, Any]) -> dict[str, Any]:
    """What tensors of classes of their own have beside the tensors that they are made of."""
    wrappers = {k: x for k, x in state.items() if is_traceable_wrapper_subclass(x)}
    return {k: x.__tensor_flatten__()[1] for k, x in wrappers.items()}


def flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with "slot.part" for each part of a tensor made of others, as of codes and scales."""
    values: dict[str, Any] = {}
    for slot, x in state.items():
        names = x.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(x) else ()
        values |= flat({f"{slot}.{name}": getattr(x, name) for name in names}) or {slot: x}
    return values


def to_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Convert a parameter's state to plain tensors, leaving out None."""
    return {
        slot: v if isinstance(v, Tensor) else torch.tensor(v, dtype=NUMBERS[type(v)])
        for slot, v in flat(state).items()
        if v is not None
    }


def from_tensors(model: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Convert tensors of `to_tensors` back, with the types, devices and layouts of `model`."""
    state = dict.fromkeys(model)
    for slot, like in model.items():
        if is_traceable_wrapper_subclass(like):
            names, context = like.__tensor_flatten__()
            inner = from_tensors({f"{slot}.{name}": getattr(like, name) for name in names}, tensors)
            parts = dict(zip(names, inner.values(), strict=True))
            state[slot] = type(like).__tensor_unflatten__(parts, context, like.shape, like.stride())
        elif (tensor := tensors.get(slot)) is None:
            continue
        elif isinstance(like, Tensor):
            state[slot] = torch.empty_like(like).copy_(tensor)
        elif like is None:
            state[slot] = tensor.clone()
        else:
            state[slot] = type(like)(tensor.item())
    return state


class Average(torch.optim.Optimizer):
    """a <- ema a + (1 - ema) w after every step of the weights w; a = w after the first.

    The update is the `step` of an optimizer, so checkpoints store a like optimizer state. The
    average equals that of torch's AveragedModel, without a second model.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], ema: float) -> None:
        super().__init__(params, {"ema": ema})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [p for p in group["params"] if self.state[p]]
            averages = [self.state[p]["average"] for p in weights]
            if weights:
                get_ema_multi_avg_fn(group["ema"])(averages, weights, 0)
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["average"] = p.detach().clone()

    def swap(self) -> None:
        """Exchange weights and averages in place, for all weights that have an average."""
        for p, state in self.state.items():
            if state:
                # .data: no graph uses the weights until they are exchanged back
                weights = p.data.clone()
                p.data.copy_(state["average"])
                state["average"].copy_(weights)
