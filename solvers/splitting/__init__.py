"""Methods that couple blocks by auxiliary variables, and what a rank stores of these."""
