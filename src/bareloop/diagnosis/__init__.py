"""A trace and a benchmark to reasons: verdicts, causes, findings."""
