"""Methods whose blocks train on a loss of their own."""
