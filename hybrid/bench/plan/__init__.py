"""What a cluster would do, from the measured time of every unit: which way to train is fastest."""
