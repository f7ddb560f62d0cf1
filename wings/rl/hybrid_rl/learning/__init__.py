"""What is learned, and from what: networks, losses, the replay buffer."""
