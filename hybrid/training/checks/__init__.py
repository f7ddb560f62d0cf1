"""What a training is refused for before it starts."""
