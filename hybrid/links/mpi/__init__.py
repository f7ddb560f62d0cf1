"""Links between MPI ranks."""
