#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generates text with a model of Hugging Face transformers whose experts are on a service, word by word as it comes.

hf_chat.py [--experts URL] [--model NAME] [--tokens N] [--float32] [--report-file FILE] CHECKPOINT [PROMPT]

Without --experts they are in this process, as transformers has them. Without PROMPT each line of the input is one.
A checkpoint without a tokenizer is taken for a model of bytes.
"""
import argparse
import os
import sys

import torch
import transformers


class Bytes:
    """A token is a byte."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids)


class Words:
    def __init__(self, checkpoint):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)

    def encode(self, text):
        if self.tokenizer.chat_template is None:
            return self.tokenizer(text).input_ids
        turn = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]

    def decode(self, ids):
        return self.tokenizer.decode(ids).encode()


class Printer:
    """What transformers calls with the prompt's ids, then with each new one."""

    def __init__(self, words):
        self.words, self.ids, self.shown = words, None, 0

    def put(self, ids):
        if self.ids is None:
            self.ids = []
            return
        self.ids += ids.flatten().tolist()
        text = self.words.decode(self.ids)
        sys.stdout.buffer.write(text[self.shown :])
        sys.stdout.buffer.flush()
        self.shown = len(text)

    def end(self):
        pass


def load(options):
    dtype = torch.float32 if options.float32 else "auto"
    if options.experts is None:
        return transformers.AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=dtype)
    import expertd.hf

    return expertd.hf.from_pretrained(options.checkpoint, experts=options.experts, model_name=options.model, dtype=dtype)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--experts")
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--report-file")
    parser.add_argument("checkpoint")
    parser.add_argument("prompt", nargs="?")
    options = parser.parse_args()
    model = load(options)
    has_words = any(os.path.exists(f"{options.checkpoint}/{name}") for name in ("tokenizer.json", "tokenizer_config.json"))
    words = Words(options.checkpoint) if has_words or not os.path.isdir(options.checkpoint) else Bytes()
    for prompt in [options.prompt] if options.prompt is not None else map(str.rstrip, sys.stdin):
        ids = torch.tensor([words.encode(prompt)])
        sys.stdout.buffer.write(prompt.encode())
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=options.tokens, pad_token_id=0, streamer=Printer(words))
        if options.prompt is None:
            print(flush=True)
    if options.report_file:
        with open(options.report_file, "w") as file:
            held = sum(p.numel() * p.element_size() for p in model.parameters())
            file.write(f"held here: {held / 1e6:.1f} MB\n")
            if options.experts is not None:
                stats = model.expertd.client.stats()
                file.write(f"experts were ready after {model.expertd.seconds_to_ready:.1f} s; {stats.calls} calls, {stats.frames_rerouted} frames re-routed\n")


if __name__ == "__main__":
    main()
