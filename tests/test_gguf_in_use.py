"""Files that are cut short or deleted while a model streams from them; read errors of the drive: test_read_errors.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support import run_python

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native")]

Copy = Callable[[str], Path]

SHRINK = """
import json, os, sys
import leanstream_gguf
from leanstream_gguf import errors

path = sys.argv[1]
llm = leanstream_gguf.Llama(path, memory_budget="min", n_ctx=128, n_batch=16, n_threads=1, verbose=False)
before = llm("the quick", max_tokens=4, temperature=0)["choices"][0]["text"]
whole = open(path, "rb").read()
os.truncate(path, len(whole) // 3)
kinds, message = [], ""
for _ in range(2):
    try:
        llm("the lazy dog", max_tokens=4, temperature=0)
        kinds.append(None)
    except errors.LeanStreamError as error:
        kinds.append([kind.__name__ for kind in type(error).__mro__])
        message = str(error)
llm.close()
print(json.dumps({"before": before, "kinds": kinds, "message": message}))
"""


@pytest.mark.parametrize("name", ["dense_untied", "moe_qwen3"])
def test_file_truncated_while_in_use(scratch_copy: Copy, name: str) -> None:
    result = run_python(SHRINK, scratch_copy(name)).require()
    assert result["before"]
    for kinds in result["kinds"]:
        assert kinds is not None, "a decode with weights cut off was accepted"
        assert "FileChangedError" in kinds, kinds[0]
    assert f"{name}.gguf" in result["message"]


DELETE = """
import json, os, sys
import leanstream_gguf

path = sys.argv[1]
llm = leanstream_gguf.Llama(path, memory_budget="min", n_ctx=128, n_batch=16, n_threads=1, verbose=False)
before = llm("the quick", max_tokens=8, temperature=0)["choices"][0]["text"]
os.unlink(path)
after = llm("the quick", max_tokens=8, temperature=0)["choices"][0]["text"]
print(json.dumps([before, after]))
"""


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be deleted there")
def test_file_deleted_while_in_use_goes_on(scratch_copy: Copy) -> None:
    before, after = run_python(DELETE, scratch_copy("moe_qwen3")).require()
    assert before == after
