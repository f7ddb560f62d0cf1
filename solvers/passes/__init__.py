"""The exact pass: its order, its gaps and its messages."""
