"""What is observed inside the process of the script: one file per probe. Loaded in the process of the user; the standard library and torch only."""
