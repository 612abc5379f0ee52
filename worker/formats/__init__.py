"""Has one module for each format of thinking and calls; all modules of the folder are loaded."""
