"""Carries what rank 0 tells to the other ranks, starts them, and notices when one is lost."""
