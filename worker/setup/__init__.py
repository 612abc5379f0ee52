"""Makes the parts of a worker from the loaded model and the settings."""
