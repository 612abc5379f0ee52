"""The SSD tier's store: one file a piece of KV, found by chain hash. No MLX, no policy of reuse."""
