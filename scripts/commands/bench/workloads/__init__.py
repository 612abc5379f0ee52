"""The workloads that `hearth bench` has servers do."""
