"""How quickly `prepare` works beside the tokenizer's own batches, and whether its memory stays flat.

    python bench/data.py [--mb 100]          (docs/performance.md)

Makes conversations from the standard library's sources, a byte-level tokenizer of 32,000 tokens trained on
them and a template of the Qwen3 kind. Then, in one run: the tokenizer's `encode_batch` (and, to compare,
`encode_batch_fast`) on every fourth of the rendered texts, on one thread, before and after; in between
`python -m trainer prepare` on the JSONL file, all its processes counted, and on a tenth of it, for the
memory. Seconds are processor seconds, so other work on the machine hardly counts. The last line is one JSON
object; the exit code is 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
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
from trainer.data.reader import Reader, Settings  # noqa: E402

LEAST_RATIO = 0.9
MOST_GROWTH = 1.2  # of the largest process, for ten times the input
VOCABULARY = 32_000
BATCH = 256  # texts given to the tokenizer at once
SAMPLED_ONE_IN = 4


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


def main() -> int:
    parser = argparse.ArgumentParser(description="prepare beside the tokenizer's own batches")
    parser.add_argument("--mb", type=float, default=100)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    size = int(options.mb * 1e6)
    text = "\n".join(stdlib.read(path) for path in stdlib.files(False))
    with tempfile.TemporaryDirectory(prefix="bench-data-", dir="/var/tmp") as name:
        folder = Path(name)
        (folder / "target").mkdir()
        target = make_target(folder / "target", text[: 4 << 20])
        make_conversations(folder / "all.jsonl", size, text)
        make_conversations(folder / "tenth.jsonl", size // 10, text)

        reader = Reader(Settings(str(target)))
        texts, rows, total, sampled = [], 0, 0, 0
        with (folder / "all.jsonl").open(encoding="utf-8") as file:
            for rows, line in enumerate(file, 1):
                total += len(line.encode())
                if rows % SAMPLED_ONE_IN == 0:
                    sampled += len(line.encode())
                    conversation = records.read(json.loads(line))
                    assert isinstance(conversation, records.Conversation)
                    texts += [rendered.text for rendered in reader.render(conversation)]
        batches = [texts[at : at + BATCH] for at in range(0, len(texts), BATCH)]
        tokenizer = reader.encoder.tokenizer
        seconds: dict[str, list[float]] = {"encode_batch": [], "encode_batch_fast": []}
        for later in (False, True):
            for name, times in seconds.items():
                times.append(processor_seconds(partial(encode, batches, getattr(tokenizer, name))))
            if not later:
                tenth = prepare(folder / "tenth.jsonl", target, folder / "out", options.workers)
                whole = prepare(folder / "all.jsonl", target, folder / "out", options.workers)
    rates = {name: sampled / 1e6 / statistics.mean(times) for name, times in seconds.items()}
    mine, growth = total / 1e6 / whole[0], whole[2] / tenth[2]
    ratios = {name: mine / rate for name, rate in rates.items()}
    print(f"{total / 1e6:,.0f} MB of conversations, {rows:,} rows; a processor second gives:")
    for name, rate in rates.items():
        print(f"  {f'tokenizer.{name}, one thread':52}{rate:6.2f} MB")
    print(f"  {f'trainer prepare, {options.workers} workers, start included':52}{mine:6.2f} MB")
    print(
        f"prepare at {ratios['encode_batch']:.2f} of encode_batch's rate (at least {LEAST_RATIO}), "
        f"{ratios['encode_batch_fast']:.2f} of encode_batch_fast's; {whole[1]:.1f} s to wait"
    )
    print(
        f"largest process: {tenth[2]:,.0f} MiB for a tenth, {whole[2]:,.0f} MiB for all "
        f"({growth:.2f} times, at most {MOST_GROWTH})"
    )
    result = {"bench": "data", "mb": round(total / 1e6, 1), "ratio": round(ratios["encode_batch"], 3)}
    result |= {"ratio_fast": round(ratios["encode_batch_fast"], 3), "mb_per_s_a_core": round(mine, 2)}
    result |= {"mib": round(whole[2]), "growth": round(growth, 3)}
    print(json.dumps(result))
    return 0 if ratios["encode_batch"] >= LEAST_RATIO and growth <= MOST_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
