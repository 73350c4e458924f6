"""Which stored entry fills which leaf of a state in memory: pure planning, before anything is read."""
