"""The run folder: what is written, and what is believed of what is read."""
