"""Names whose forward runs, and runs those apart that a worker died with."""
