"""The meter that a measured server has on its PYTHONPATH."""
