"""Has what the formats share: what one consists of, how one is found, how answers are split."""
