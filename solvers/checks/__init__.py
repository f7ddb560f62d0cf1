"""Whether what is trained is what its user gave: constant draws, passes by parts, means."""
