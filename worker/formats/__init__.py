"""Has one module for each form in which models write thinking and calls; the folder is the list."""
