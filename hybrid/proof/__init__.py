"""Before its first step a run is compared with the undivided network."""
