"""What is learnt, and from what: networks, losses, the replay buffer."""
