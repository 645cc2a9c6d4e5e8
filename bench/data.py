"""How quickly `prepare` works beside the tokenizer's own batches, and whether its memory stays flat.

    python bench/data.py [--mb 100]          (docs/performance.md)

Makes conversations from the standard library's sources, a byte-level tokenizer of 32,000 tokens trained on
them and a template of the Qwen3 kind. In one run: `python -m trainer prepare` on the file, all its processes
and their start counted, between two measurements of the tokenizer's own `encode_batch` (and, to compare,
`encode_batch_fast`) on the rendered texts of some chunks all over the file, on one thread, the best of some
rounds; and the command on a tenth of the file, for the memory. Seconds are processor seconds. The last line
is one JSON object; the exit code is 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "trainer" / "data")]

from chat_kinds import CHATML_SPECIAL, QWEN3, byte_level  # noqa: E402

from trainer.data import records, stdlib  # noqa: E402
from trainer.data.lines import lines_in  # noqa: E402
from trainer.data.prepare import CHUNK_BYTES, plan  # noqa: E402
from trainer.data.reader import Reader, Settings  # noqa: E402

LEAST_RATIO = 0.9
MOST_GROWTH = 1.2  # of the largest process, for ten times the input
VOCABULARY = 32_000
BATCH = 256  # texts given to the tokenizer at once
SAMPLED_CHUNKS, ROUNDS = 5, 2  # rounds: before, and as many after


def make_target(folder: Path, text: str) -> Path:
    tokenizer = byte_level(CHATML_SPECIAL, VOCABULARY, text=text)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(QWEN3)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": CHATML_SPECIAL[1]}))
    return folder


def make_conversations(path: Path, size: int, text: str) -> None:
    """About `size` bytes of conversations of one to four turns."""
    chance = random.Random(0)

    def words(low: float, high: float) -> str:
        length = int(chance.uniform(low, high))
        start = chance.randrange(len(text) - length)
        return text[start : start + length].strip()  # as people and targets write

    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            messages = []
            for _ in range(chance.randint(1, 4)):
                messages.append({"role": "user", "content": words(50, 800)})
                messages.append({"role": "assistant", "content": words(300, 4000)})
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def processor_seconds(act: Callable[[], object]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def encode(batches: Sequence[list[str]], how: Callable[..., Any]) -> None:
    for batch in batches:
        for encoding in how(batch, add_special_tokens=False):
            encoding.ids  # noqa: B018  (ids that nobody fetches are of no use)


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def high_water_mib(pid: int) -> float:
    """The most memory that a process has had so far; 0 when it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


def prepare(source: Path, target: Path, out: Path, workers: int) -> tuple[float, float, float]:
    """Processor seconds of all its processes, seconds, MiB of the largest process."""
    argv = [
        sys.executable,
        "-m",
        "trainer",
        "prepare",
        str(source),
        "--target",
        str(target),
        "--out",
        str(out),
    ]
    began = time.perf_counter()
    process = subprocess.Popen([*argv, "--workers", str(workers)], cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    most = 0.0
    while True:
        done, status, usage = os.wait4(process.pid, os.WNOHANG)
        if done:
            break
        most = max(most, *map(high_water_mib, [process.pid, *children(process.pid)]))
        time.sleep(0.1)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"prepare ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - began, most


def sample(source: Path, target: Path) -> tuple[float, list[list[str]], Any]:
    """MB of JSONL in some chunks, their rendered texts in batches, and the tokenizer."""
    reader = Reader(Settings(str(target)))
    size, batches = 0, []
    chunks = plan([source], CHUNK_BYTES)
    for chunk in chunks[:: max(1, len(chunks) // SAMPLED_CHUNKS)][:SAMPLED_CHUNKS]:
        texts: list[str] = []
        for line in lines_in(chunk.path, chunk.start, chunk.stop, 1 << 24):
            conversation = records.read(json.loads(line.raw or b""))
            assert isinstance(conversation, records.Conversation)
            texts += [rendered.text for rendered in reader.render(conversation)]
            size += line.size
        batches += [texts[at : at + BATCH] for at in range(0, len(texts), BATCH)]
    return size / 1e6, batches, reader.encoder.tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description="prepare beside the tokenizer's own batches")
    parser.add_argument("--mb", type=float, default=100)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    text = "\n".join(stdlib.read(path) for path in stdlib.files(False))
    with tempfile.TemporaryDirectory(prefix="bench-data-", dir="/var/tmp") as name:
        folder = Path(name)
        (folder / "target").mkdir()
        target = make_target(folder / "target", text[: 4 << 20])
        make_conversations(folder / "all.jsonl", int(options.mb * 1e6), text)
        make_conversations(folder / "tenth.jsonl", int(options.mb * 1e5), text)
        mb, batches, tokenizer = sample(folder / "all.jsonl", target)
        times: dict[str, list[float]] = {"encode_batch": [], "encode_batch_fast": []}
        for later in (False, True):
            for _ in range(ROUNDS):
                for name, each in times.items():
                    each.append(processor_seconds(partial(encode, batches, getattr(tokenizer, name))))
            if not later:
                tenth = prepare(folder / "tenth.jsonl", target, folder / "out", options.workers)
                whole = prepare(folder / "all.jsonl", target, folder / "out", options.workers)
    rates = {name: mb / min(each) for name, each in times.items()}
    mine, growth = options.mb / whole[0], whole[2] / tenth[2]
    ratio, fast = (mine / rate for rate in rates.values())
    print(f"{options.mb:,.0f} MB of conversations, MB a processor second:")
    for name, rate in {**rates, f"trainer prepare, {options.workers} workers": mine}.items():
        print(f"  {name:32}{rate:6.2f}")
    print(
        f"prepare at {ratio:.2f} of encode_batch's rate (at least {LEAST_RATIO}), {fast:.2f} of the fast one"
    )
    print(
        f"{whole[1]:.0f} s to wait; largest process {whole[2]:,.0f} MiB, {growth:.2f} times that of a tenth"
    )
    result = {"bench": "data", "mb": options.mb, "ratio": round(ratio, 3), "ratio_fast": round(fast, 3)}
    result |= {"mb_per_s_a_core": round(mine, 2), "wait_s": round(whole[1], 1), "mib": round(whole[2])}
    print(json.dumps({**result, "growth": round(growth, 3)}))
    return 0 if ratio >= LEAST_RATIO and growth <= MOST_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
