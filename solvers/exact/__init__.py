"""The exact pass over all blocks: its order and its messages."""
