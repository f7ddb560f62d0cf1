"""Training by messages through a graph of nodes (Gaunt et al., arXiv 1705.09786, sections 3 to 5).

A room by itself: it knows torch, and nothing of blocks, links and runs. docs/messages.md has a
complete example.
"""

from solvers.messages.any_order import AnyOrder
from solvers.messages.control import Cond, Loop, Phi, Source
from solvers.messages.controller import Entry, Executor
from solvers.messages.graph import Graph
from solvers.messages.joins import Bcast, Concat, Group, Sum, Ungroup
from solvers.messages.layer import Layer, Loss, Outcome
from solvers.messages.message import Message, State
from solvers.messages.node import Node
from solvers.messages.static import Static
from solvers.messages.together import Together

__all__ = [
    "AnyOrder",
    "Bcast",
    "Concat",
    "Cond",
    "Entry",
    "Executor",
    "Graph",
    "Group",
    "Layer",
    "Loop",
    "Loss",
    "Message",
    "Node",
    "Outcome",
    "Phi",
    "Source",
    "State",
    "Static",
    "Sum",
    "Together",
    "Ungroup",
]
