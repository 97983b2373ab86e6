"""What packing gains on short texts that are padded to the maximum, and whether it changes their losses.

    python benchmarks/packing.py

The texts are docstrings, tokenized; the model is a small GPT-2. One process makes passes over the same texts, collating
included, taking turns: padded to the maximum (twice, the second is the control), to the longest of the batch, to the
longest with rows of like length together, each batch packed by itself, and packed rows of the maximum's length with as
many tokens per update as a batch of texts has. All have the same real tokens, so a ratio of times is one of times per
real token. Several processes are started, since no two run at quite the same speed.

The check takes the loss of every text alone, from packed rows and from batches packed by themselves.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bareloop.benchmark import Difference, as_ratio, difference, order
from bareloop.data.bucketing import bucket_batches
from bareloop.data.collators import PackedCollator, PackingCollator, document_ids
from bareloop.data.packing import IGNORED, PackedRows, Packing

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import corpus

Text = dict[str, list[int]]
CONTROL, BASE = "padded to the maximum, again", "padded to the maximum"


def main() -> None:
    """Prints what was trained on, a table of times and a table of losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6, help="turns of each kind in a launch")
    parser.add_argument("--texts", type=int, default=128, help="in a pass, which is a turn")
    parser.add_argument("--batch", type=int, default=16, help="texts in a batch")
    parser.add_argument("--maximum", type=int, default=128, help="tokens; longer texts are cut")
    parser.add_argument("--width", type=int, default=64, help="of an embedding, a multiple of 32")
    parser.add_argument("--launch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch is not None:
        print(json.dumps(turns(options, options.launch)))
        return
    print_texts(texts(options), options)
    print_times([launched(seed) for seed in range(options.launches)], options)
    print_losses(texts(options), options)


def texts(options: argparse.Namespace) -> list[Text]:
    """The first paragraphs of `options.texts` docstrings as token ids with an end mark."""
    encode = corpus.tokenizer().encode
    return [
        {"input_ids": [*encode(source).ids[: options.maximum - 1], corpus.EOS]}
        for source, _ in corpus.pairs(options.texts)
    ]


def padded_to(width: int | None) -> Callable[[Sequence[Text]], dict[str, Any]]:
    """A collator that pads to `width` tokens, or to the longest text of the batch."""

    def collate(rows: Sequence[Text]) -> dict[str, Any]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        short = 0 if width is None else width - max(map(len, ids))

        def padded(each: Iterable[torch.Tensor], value: int) -> torch.Tensor:
            joined = pad_sequence(list(each), batch_first=True, padding_value=value)
            return torch.nn.functional.pad(joined, (0, short), value=value)

        mask = padded((torch.ones_like(row) for row in ids), 0)
        labels = padded(ids, IGNORED)
        return {"input_ids": padded(ids, corpus.PAD), "attention_mask": mask, "labels": labels, "use_cache": False}

    return collate


def loaders(rows: list[Text], options: argparse.Namespace) -> dict[str, DataLoader[Any]]:
    """A loader of each kind over the same texts; one iteration is a turn."""
    lengths = [len(row["input_ids"]) for row in rows]
    packed = PackedRows(rows, Packing(length=options.maximum))
    alike = max(1, round(fmean(lengths) * options.batch / (packed.fill * options.maximum)))
    data: Any = rows
    plain = {"batch_size": options.batch, "shuffle": True}
    return {
        BASE: DataLoader(data, collate_fn=padded_to(options.maximum), **plain),
        CONTROL: DataLoader(data, collate_fn=padded_to(options.maximum), **plain),
        "padded to the longest": DataLoader(data, collate_fn=padded_to(None), **plain),
        "padded to the longest, bucketed": DataLoader(
            data, collate_fn=padded_to(None), batch_sampler=bucket_batches(lengths, options.batch)
        ),
        "each batch packed": DataLoader(data, collate_fn=PackingCollator(), **plain),
        "packed rows": DataLoader(packed, collate_fn=PackedCollator(), batch_size=alike, shuffle=True),
    }


def gpt2(options: argparse.Namespace, attention: str = "sdpa") -> GPT2LMHeadModel:
    """A GPT-2 of 2 layers with new weights, the same ones each time."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=corpus.VOCABULARY,
        n_positions=options.maximum,
        n_embd=options.width,
        n_layer=2,
        n_head=options.width // 32,
        bos_token_id=corpus.EOS,
        eos_token_id=corpus.EOS,
    )
    config._attn_implementation = attention
    return GPT2LMHeadModel(config)


def llama(options: argparse.Namespace, attention: str = "sdpa") -> LlamaForCausalLM:
    """The same for a Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=corpus.VOCABULARY,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=2,
        num_attention_heads=options.width // 32,
    )
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


def turns(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One launch: seconds of every kind per round, and what a pass of each kind computes."""
    kinds = loaders(texts(options), options)
    models = {kind: gpt2(options) for kind in kinds}
    optimizers = {kind: torch.optim.AdamW(model.parameters(), lr=1e-4) for kind, model in models.items()}

    def turn(kind: str) -> float:
        started = time.perf_counter()
        for batch in kinds[kind]:
            models[kind](**batch).loss.backward()
            optimizers[kind].step()
            optimizers[kind].zero_grad()
        return time.perf_counter() - started

    for kind in kinds:
        turn(kind)  # Allocates; the first pass is slower than any other.
    rounds = [{kind: turn(kind) for kind in names} for names in order(list(kinds), options.rounds, seed)]
    work = {
        kind: {"updates": len(loader), "tokens": sum(batch["input_ids"].numel() for batch in loader)}
        for kind, loader in kinds.items()
    }
    return {"rounds": rounds, "work": work}


def launched(seed: int) -> dict[str, Any]:
    """`turns` in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--launch", str(seed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


def print_texts(rows: list[Text], options: argparse.Namespace) -> None:
    """How long the texts are."""
    lengths = sorted(len(row["input_ids"]) for row in rows)
    print(
        f"{len(rows)} texts of {lengths[0]} to {lengths[-1]} tokens, mean {fmean(lengths):.1f}, "
        f"median {lengths[len(rows) // 2]}; maximum {options.maximum}; GPT-2, 2 layers of {options.width}, "
        f"{options.batch} texts a batch; torch {torch.__version__}, {torch.get_num_threads()} threads\n"
    )


def print_times(launches: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Work of each kind, and its time per real token against padding to the maximum."""
    real = sum(len(row["input_ids"]) for row in texts(options))
    print(
        "| batches | updates in a pass | tokens computed per real one | time per real token, 95 % interval | faster |"
    )
    print("|---|---|---|---|---|")
    for kind, work in launches[0]["work"].items():
        cell, gain = "1", ""
        if kind != BASE:
            ratio, low, high = as_ratio(against_base(launches, kind))
            cell, gain = f"{ratio:.3f} [{low:.3f}, {high:.3f}]", f"{1 / ratio:.2f}x"
        print(f"| {kind} | {work['updates']} | {work['tokens'] / real:.2f} | {cell} | {gain} |")
    print(f"\n{len(launches)} launches of {options.rounds} rounds.\n")


def against_base(launches: list[dict[str, Any]], kind: str) -> Difference:
    """Log of the time of `kind` over that of padding to the maximum, whose two turns a round are averaged."""

    def value(seconds: dict[str, float]) -> float:
        if kind == CONTROL:
            return math.log(seconds[CONTROL] / seconds[BASE])
        return math.log(seconds[kind]) - (math.log(seconds[BASE]) + math.log(seconds[CONTROL])) / 2

    found = difference([[value(seconds) for seconds in launch["rounds"]] for launch in launches], pool=True)
    if found is None:
        raise SystemExit("too few turns for an interval: at least 2 launches, or one of 4 rounds")
    return found


def print_losses(rows: list[Text], options: argparse.Namespace) -> None:
    """The largest difference of a text's mean loss from that of the text alone."""
    print("| model | attention | packed rows | each batch packed |\n|---|---|---|---|")
    packed = list(PackedRows(rows, Packing(length=options.maximum)))
    for make in (gpt2, llama):
        for attention in ("sdpa", "eager"):
            model = make(options, attention).eval()
            with torch.no_grad():
                expected = [loss for row in rows for loss in losses(model, PackedCollator()([row])).items()]
                from_rows = losses(model, PackedCollator()(packed))
                cuts = range(0, len(rows), options.batch)
                batches = [PackingCollator()(rows[start : start + options.batch]) for start in cuts]
                from_batches = {text: loss for batch in batches for text, loss in losses(model, batch).items()}
            cells = [max(abs(found[text] - loss) for text, loss in expected) for found in (from_rows, from_batches)]
            print(f"| {make.__name__} | {attention} | {cells[0]:.1e} | {cells[1]:.1e} |")
    print(f"\nLargest difference of the mean loss of a text from that of the text alone, {len(rows)} texts.")


def losses(model: torch.nn.Module, batch: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Tokens of each text in the batch -> mean loss of its next tokens."""
    each = cross_entropy(
        model(**batch).logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], ignore_index=IGNORED, reduction="none"
    )
    documents = document_ids(batch["position_ids"])
    found: dict[tuple[int, ...], float] = {}
    for ids, numbers, row in zip(batch["input_ids"], documents, each, strict=True):
        for number in range(int(numbers[-1]) + 1):
            here = numbers == number
            counted = row[here[1:] & here[:-1]]
            found[tuple(ids[here].tolist())] = float(counted.mean()) if len(counted) else 0.0
    return found


if __name__ == "__main__":
    main()
