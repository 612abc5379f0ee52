"""The HTML page that `hearth bench` writes."""
