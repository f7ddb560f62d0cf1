"""Training by messages through a graph of nodes (Gaunt et al., arXiv 1705.09786, sections 3 to 5).

A room by itself: it knows torch, and nothing of blocks, links and runs. docs/messages.md has a
complete example.
"""

from hybrid_messages.any_order import AnyOrder
from hybrid_messages.control import Cond, Loop, Phi, Source
from hybrid_messages.controller import Entry, Executor
from hybrid_messages.graph import Graph
from hybrid_messages.joins import Bcast, Concat, Group, Sum, Ungroup
from hybrid_messages.layer import Layer, Loss, Outcome
from hybrid_messages.message import Message, State
from hybrid_messages.node import Node
from hybrid_messages.static import Static
from hybrid_messages.together import Together

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
