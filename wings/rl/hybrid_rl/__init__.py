"""Reinforcement learning in blocks: a representation, a learner that no gradient leaves, actors."""
