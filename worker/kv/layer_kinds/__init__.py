"""Declares each kind of layer cache: what it holds of each token, and how that is put back."""
