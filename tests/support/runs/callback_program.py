"""Callbacks that note what they are told, or fail; and a short training that has them."""

import threading

from trainings import digits, trainer
from world import launched

from hybrid import Callback
from hybrid.links import AgreedError
from hybrid.settings.config import OptimizerSettings
from hybrid.solvers import Backprop

STEPS = 5
"""Of an epoch; a run reports after 4 of them, which are a window, and at its end."""
STILL = OptimizerSettings(lr=1e-12)
"""Steps after which the accuracy is what it was."""


class Recorder(Callback):
    """Notes (hook, arguments), and the threads that called."""

    def __init__(self):
        self.told, self.threads = [], set()

    def hooks(self):
        return [hook for hook, *_ in self.told]

    def of(self, hook):
        """The arguments of every call of a hook."""
        return [told for name, *told in self.told if name == hook]


def _noting(hook):
    def note(self, *told):
        self.told.append((hook, *told))
        self.threads.add(threading.current_thread().name)

    return note


for name in ("start", "report", "epoch", "end"):
    setattr(Recorder, f"on_{name}", _noting(f"on_{name}"))
Recorder.close = _noting("close")


class Failing(Callback):
    """Raises in one hook."""

    def __init__(self, hook, error=None):
        def fail(*told):
            raise error or ValueError("out of luck")

        setattr(self, hook, fail)


def short(callbacks, out=None, epochs=2, blocks=2, train=(), **settings):
    """A run of epochs of `STEPS` steps."""
    return trainer(
        settings.pop("solver", None) or Backprop(),
        out,
        blocks,
        model="plain",
        callbacks=callbacks,
        train={"epochs": epochs, "report_every": 4, **dict(train)},
        **settings,
    )


def short_data():
    return digits(STEPS)


def failed(comm, hook, out):
    """On a rank of a communicator: the line that a run with a failing callback ends with."""
    # as in a script that makes its callbacks on the first rank alone
    callbacks = [Failing(hook)] if comm.rank == 0 else []
    with launched(comm):
        try:
            short(callbacks, out).fit(*short_data())
        except AgreedError as error:
            return str(error)
    return "went well"
