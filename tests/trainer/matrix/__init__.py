"""The bit-equality matrix: settings, the recorder of a run, the runner of two processes, and what compares them."""
