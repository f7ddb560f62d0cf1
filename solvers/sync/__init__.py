"""Synchronization of replicas: one file for each strategy."""

from hybrid.solvers.peers import Peers, Sync
from hybrid.solvers.sync.all_reduce import AllReduce
from hybrid.solvers.sync.base import Strategy
from hybrid.solvers.sync.diloco import DiLoCo
from hybrid.solvers.sync.local_sgd import LocalSGD

__all__ = ["AllReduce", "DiLoCo", "LocalSGD", "Peers", "Strategy", "Sync"]
