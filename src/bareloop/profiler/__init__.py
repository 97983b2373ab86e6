"""Scripts we do not own to traces: launches them with probes, takes turns, counts and times."""
