"""Workloads are what `hearth bench` has servers do."""
