"""How the replicas of a block agree on its weights: one file a strategy."""
