"""All of our kernels by Triton's interpreter, in one process: torch and Triton are imported once.

Prints one JSON object. Run with TRITON_INTERPRET=1 in the environment before Triton is first imported.
"""

from __future__ import annotations

import json

import adamw_by_interpreter
import attention_by_interpreter
import errors_by_interpreter
import norm_rope_by_interpreter

PARTS = {
    "adamw": adamw_by_interpreter,
    "attention": attention_by_interpreter,
    "errors": errors_by_interpreter,
    "norm and RoPE": norm_rope_by_interpreter,
}
print(json.dumps({name: part.run() for name, part in PARTS.items()}))
