"""How large a step delayed gradients allow: SGD with Nesterov momentum on a parabola.

    python docs/benchmarks/delay_limits.py

v <- m v + c w_{t-d},  w <- w - lr (m v + c w_{t-d}) for curvature c. Printed is the largest
c lr / (1 - m) at which w still goes to zero, by the roots of the characteriztic polynomial.
"""

from __future__ import annotations

import numpy as np


def largest_step(delay: int, momentum: float) -> float:
    """c lr / (1 - m) at the edge of stability, by bisection."""
    low, high = 0.0, 2 * (1 + momentum)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if radius(middle, delay, momentum) < 1 else (low, middle)
    return low / (1 - momentum)


def radius(step: float, delay: int, momentum: float) -> float:
    """Largest root of (z - 1)(z - m) z^d + c lr ((m + 1) z - m), step = c lr."""
    inertia = np.concatenate([np.polymul([1, -1], [1, -momentum]), np.zeros(delay)])
    force = step * np.array([momentum + 1, -momentum])
    return float(np.abs(np.roots(np.polyadd(inertia, force))).max())


def main() -> None:
    delays = (0, 1, 2, 3, 4, 6)
    print("| momentum | " + " | ".join(f"d = {d}" for d in delays) + " |")
    print("|---" * (len(delays) + 1) + "|")
    for momentum in (0.0, 0.5, 0.9):
        limits = " | ".join(f"{largest_step(d, momentum):.2f}" for d in delays)
        print(f"| {momentum} | {limits} |")


if __name__ == "__main__":
    main()
