#!/usr/bin/env python3
"""Rearrange a GGUF file for streaming: `leanstream repack` as a script, with the same arguments."""

from __future__ import annotations

import sys

from leanstream_gguf.cli import main

if __name__ == "__main__":
    sys.exit(main(["repack", *sys.argv[1:]]))
