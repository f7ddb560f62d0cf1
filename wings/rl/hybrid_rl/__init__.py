"""Reinforcement learning in blocks: a representation, a learner, and actors."""
