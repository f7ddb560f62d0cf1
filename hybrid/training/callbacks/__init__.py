"""What is called while a run trains: its progress line, early stopping, logs."""
