"""The exact pass over all blocks: its order, its messages, and the local steps in its gaps."""
