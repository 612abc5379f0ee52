"""Runs mlx-lm alone as a process that reads [tokens_max, text, bits] lines and writes token ids.

Embeddings are scaled by so many last bits: what then is another token was a tie.
"""

import json
import sys

from mlx_lm import load, stream_generate

from scripts.harness.warm.token_margins import scaled_embeddings


def main() -> None:
    model, tokenizer = load(sys.argv[1])
    for line in sys.stdin:
        tokens_max, text, bits = json.loads(line)
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        with scaled_embeddings(model, bits):
            answer = stream_generate(model, tokenizer, ids, max_tokens=tokens_max)
            said = [response.token for response in answer]
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
