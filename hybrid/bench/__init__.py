"""Ways to train one network, timed in turn inside one job."""
