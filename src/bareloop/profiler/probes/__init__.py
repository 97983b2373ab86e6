"""What is observed inside the process of the script, one file per probe: the standard library and torch only."""
