"""Training by messages: graphs of nodes, and chains of blocks (Gaunt et al., arXiv 1705.09786)."""

from hybrid.errors import OWN
from hybrid_messages.ampnet import AMPNet
from hybrid_messages.control import Bcast, Cond, Group, Loop, Loss, Outcome, Phi, Source, Sum
from hybrid_messages.executor import Entry, Executor, Static
from hybrid_messages.graph import Graph
from hybrid_messages.layer import Layer
from hybrid_messages.node import Message, Node, State
from hybrid_messages.pd_asgd import PDASGD
from hybrid_messages.replicas import replicated

OWN.add(__name__)

__all__ = [
    "PDASGD",
    "AMPNet",
    "Bcast",
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
    "replicated",
]
