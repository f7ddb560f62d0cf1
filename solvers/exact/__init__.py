"""The exact pass over all blocks: its order, its messages, and the local work in its gaps."""
