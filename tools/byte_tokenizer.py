"""byte_tokenizer.py FOLDER: a Hugging Face tokenizer whose token ids are the raw byte values.

256, 257 and 258 are <bos>, <eos> and <pad>; nothing is added to a prompt by itself.
"""

import argparse
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = 256, 257, 258


def byte_symbols() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte, mapped to the byte value."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    symbols, spare = {}, 256
    for byte in range(256):
        symbols[chr(byte if byte in printable else spare)] = byte
        spare += byte not in printable
    return symbols


def build() -> PreTrainedTokenizerFast:
    """The tokenizer: 256 bytes, no merges, three special tokens."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_symbols(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    build().save_pretrained(parser.parse_args().folder)
