"""Train the demo's frozen target: a Qwen3 of under 3 M parameters on the Python standard library's sources.

    python -m trainer.pretrain --out recipes/demo/target            # a GPU takes minutes, a CPU an evening

The result is an ordinary transformers checkpoint (bf16 safetensors, config.json, tokenizer). Held-out files
follow the one rule in trainer/data/stdlib.py, so the demo evaluates on text that the target never saw,
whatever Python version it runs on. Prints held-out bits per byte and the share of repeated 8-grams in greedy
text. The shipped target: `--tests --epochs 10 --muon-lr 6e-3`, 2,606 steps on a GPU; its pretraining.json has
the figures. Without the library's tests the same model learns its 2.7 M training tokens by heart.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer.data import stdlib

END_TOKEN, MASK_TOKEN = "<|endoftext|>", "<|mask|>"
VOCAB = 2048
WINDOW = 512  # tokens a training row and an evaluation window


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of VOCAB entries; id 0 ends a file, id 1 is the drafter's mask, never in text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        # Runs of spaces (indentation) stay whole words, so one token can be one level of indentation.
        [
            pre_tokenizers.Split(Regex(r"\n[ ]*| ?[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END_TOKEN, MASK_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_TOKEN, mask_token=MASK_TOKEN, model_max_length=2048
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All files in one row of token ids, each ended by END_TOKEN. [tokens], int64."""
    end = tokenizer.eos_token_id
    ids: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False):
        ids += [*encoding.ids, end]
    return torch.tensor(ids, dtype=torch.int64)


def config(layers: int, hidden: int, ffn: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, ids: torch.Tensor, total_bytes: int, device: str) -> float:
    """Held-out bits a byte: windows of WINDOW tokens, the second half scored (all of the first window)."""
    half, nats = WINDOW // 2, 0.0
    starts = list(range(0, max(1, len(ids) - WINDOW), half))
    for first in range(0, len(starts), 64):
        chunk = starts[first : first + 64]
        rows = torch.stack([ids[s : s + WINDOW + 1] for s in chunk if s + WINDOW + 1 <= len(ids)]).to(device)
        logits = model(input_ids=rows[:, :-1]).logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(
            len(rows), -1
        )
        nats += losses[:, half:].sum().item()
        if first == 0:
            nats += losses[0, :half].sum().item()
    return nats / math.log(2) / total_bytes


@torch.no_grad()
def repeated_8grams(model: Qwen3ForCausalLM, prompts: torch.Tensor, new_tokens: int) -> float:
    """Share of 8-grams in greedy continuations that occurred earlier in the same continuation."""
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        do_sample=False,
        min_new_tokens=new_tokens,
    )[:, prompts.shape[1] :].tolist()
    repeats = total = 0
    for row in out:
        seen: set[tuple[int, ...]] = set()
        for i in range(len(row) - 7):
            gram = tuple(row[i : i + 8])
            repeats += gram in seen
            total += 1
            seen.add(gram)
    return repeats / total


def optimizers(model: torch.nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms; each parameter in exactly one."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(
            matrices, lr=muon_lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(progress: float) -> float:
    """Share of the peak learning rate at `progress` in [0, 1]: 2 % warm-up, then linear to zero."""
    return min(progress / 0.02, 1.0) if progress < 0.02 else max(0.0, (1 - progress) / 0.98)


def train(args: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(args.seed)
    device = args.device
    base = Path(args.stdlib) if args.stdlib else stdlib.root()
    texts = [stdlib.read(p) for p in stdlib.files(held_out=False, base=base)]
    held = [stdlib.read(p) for p in stdlib.files(held_out=True, base=base)]
    if args.tests:  # the library's own tests: more Python to read, never part of the held-out text
        texts += [stdlib.read(p) for p in sorted((base / "test").rglob("*.py"))]
    tokenizer = train_tokenizer(texts)
    ids, held_ids = encode(tokenizer, texts).to(device), encode(tokenizer, held)
    held_bytes = sum(len(t.encode()) for t in held)
    print(
        f"{len(texts)} files, {sum(len(t.encode()) for t in texts) / 1e6:.1f} MB, {len(ids):,} tokens; "
        f"held out {len(held)} files, {held_bytes / 1e6:.2f} MB, {held_bytes / len(held_ids):.2f} bytes/token"
    )
    model = Qwen3ForCausalLM(config(args.layers, args.hidden, args.ffn)).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters")
    body = torch.compile(model) if device == "cuda" else model
    optims = optimizers(model, args.muon_lr, args.adam_lr)
    peaks = [o.param_groups[0]["lr"] for o in optims]
    steps = int(args.epochs * len(ids) / (args.batch * WINDOW))
    generator = torch.Generator().manual_seed(args.seed)
    averaged = {n: p.detach().clone() for n, p in model.named_parameters()}
    began = time.monotonic()
    for step in range(steps):
        starts = torch.randint(0, len(ids) - WINDOW - 1, (args.batch,), generator=generator)
        rows = ids[(starts[:, None] + torch.arange(WINDOW + 1)).to(device)]
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = body(input_ids=rows[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optim, peak in zip(optims, peaks, strict=True):
            optim.param_groups[0]["lr"] = peak * schedule(step / steps)
            optim.step()
            optim.zero_grad(set_to_none=True)
        # An exponential average of the weights over about 1 % of the run beats the last iterate.
        decay = max(0.0, 1 - 100 / max(steps, 1)) if step > 100 else 0.0
        with torch.no_grad():
            for name, p in model.named_parameters():
                averaged[name].lerp_(p, 1 - decay)
        if step % max(1, steps // 20) == 0 or step == steps - 1:
            print(f"step {step}/{steps} loss {loss.item():.3f} {time.monotonic() - began:.0f} s", flush=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(averaged[name])
    model = model.to(torch.bfloat16).to(torch.float32)  # judge what is stored
    prompts = torch.stack([held_ids[i * 1000 : i * 1000 + 64] for i in range(24)]).to(device)
    result = {
        "bits_per_byte": round(bits_per_byte(model, held_ids, held_bytes, device), 4),
        "repeated_8grams": round(repeated_8grams(model, prompts, 128), 4),
        "parameters": parameters,
        "epochs": args.epochs,
        "seconds": round(time.monotonic() - began, 1),
    }
    if args.out:
        out = Path(args.out)
        model.to(torch.bfloat16).save_pretrained(out)
        tokenizer.save_pretrained(out)
        (out / "pretraining.json").write_text(
            json.dumps({**vars(args), **result, "stdlib": "", "out": ""}, indent=1)
        )
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="folder of the checkpoint")
    parser.add_argument("--stdlib", help="a standard library's folder (default: this interpreter's)")
    parser.add_argument("--tests", action="store_true", help="also read the library's own tests")
    parser.add_argument("--epochs", type=float, default=30)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--ffn", type=int, default=640)
    parser.add_argument("--batch", type=int, default=64, help=f"rows of {WINDOW} tokens a step")
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
