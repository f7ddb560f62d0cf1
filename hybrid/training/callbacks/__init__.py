"""What is called while a run trains."""
