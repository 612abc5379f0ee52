"""Reads the PDFs and text files of requests as text."""
