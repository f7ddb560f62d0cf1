"""Code that sees every operation of torch."""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """The base of the modes here; torch would import its compiler for it, for a second."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """What torch asks a class: whether the compiler is to be told to leave its code alone."""
        return False
