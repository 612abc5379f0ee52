"""Runs mlx-lm alone as a process that reads [tokens_max, text] lines and writes token ids."""

import json
import sys

from mlx_lm import load, stream_generate


def main() -> None:
    model, tokenizer = load(sys.argv[1])
    for line in sys.stdin:
        tokens_max, text = json.loads(line)
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        answer = stream_generate(model, tokenizer, ids, max_tokens=tokens_max)
        print(json.dumps([response.token for response in answer]), flush=True)


if __name__ == "__main__":
    main()
