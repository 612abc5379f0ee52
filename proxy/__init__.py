"""The proxy process: takes HTTP requests, hands them to workers, and sends the answers back."""
