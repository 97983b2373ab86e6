"""The parts of `swarm_failures.py`: a peer, a network to cut, garbage to send, a run, and the judge of its logs."""
