"""Methods whose blocks train on a local loss."""
