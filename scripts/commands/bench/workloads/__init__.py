"""What `hearth bench` has servers do."""
