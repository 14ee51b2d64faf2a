"""Train one tiny hybrid on the mixture of local tasks. See tools/README.md for the exact commands.

    python tools/train_tiny.py tiny-nemotron-h --corpus train.txt --out folder --seconds 240

A step takes a batch of whole streams of all tasks; only answers carry loss (text: every byte), and
each task's loss is a mean over its own answers, weighted as in ``MIX``. The length grows with the
time spent. On a GPU the whole step, optimiser included, is one CUDA graph, since these models are
bound by launches; where capturing fails the program starts itself again with ``--eager``.
"""

import argparse
import math
import multiprocessing as mp
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("USE_HUB_KERNELS", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from replayssm_quant._paths import drop_checkout

drop_checkout()  # the folder kernels/ must not be taken for the package of that name

import numpy as np  # noqa: E402

from replayssm_quant.evals.tasks import streams, text  # noqa: E402

Mix = dict[str, tuple[float, float]]

# task -> (share of the streams, share of the loss); ``text`` is for models that shall write
MIXES: dict[str, Mix] = {
    "tasks": {
        "count": (0.35, 0.30),
        "recall": (0.25, 0.25),
        "leaky_mean": (0.15, 0.15),
        "tally": (0.15, 0.20),
        "text": (0.10, 0.10),
    },
    "text": {
        "count": (0.25, 0.25),
        "recall": (0.20, 0.20),
        "leaky_mean": (0.10, 0.10),
        "tally": (0.15, 0.15),
        "text": (0.30, 0.30),
    },
}
MIX = MIXES["tasks"]
NAMES = list(MIX)
# longest length -> [(share of the time, length, streams in a batch)]
STAGES = {
    512: [(0.08, 64, 256), (0.17, 128, 128), (0.30, 256, 64), (0.45, 512, 32)],
    1024: [(0.08, 64, 256), (0.14, 128, 128), (0.22, 256, 64), (0.28, 512, 32), (0.28, 1024, 16)],
    4096: [
        (0.06, 64, 256),
        (0.10, 128, 128),
        (0.15, 256, 64),
        (0.22, 512, 32),
        (0.19, 1024, 16),
        (0.28, 4096, 8),
    ],
}
BLOCK = 6  # batches drawn at a time: the generators are vectorised over streams


def sparse(rng: np.random.Generator, length: int) -> dict[str, float | tuple[float, float]]:
    """Settings of ``draw_count`` that spread about 150 events over a long stream."""
    event = float(rng.uniform(100, 250)) / length
    query = 1.5 * event
    fill = 1 - query - event
    return {"p_query": query, "p_fill": (fill, fill)}


def draw(
    name: str, rng: np.random.Generator, n: int, length: int, corpus: np.ndarray
) -> streams.Drawn:
    """Training streams of one task; easier settings at short lengths, all settings at long ones.

    Beyond 512 tokens half of the counting and recall streams are mostly filler, so that what is
    stored must last.
    """
    long = length > 512 and rng.random() < 0.5
    if name == "count":
        return streams.draw_count(rng, n, length, **(sparse(rng, length) if long else {}))
    if name == "recall":
        keys = {64: (2, 8), 128: (4, 16), 256: (8, 40)}.get(length, (16, 62))
        again = float(rng.choice([0.0, 0.1, 0.2]))
        if long:
            return streams.draw_recall(rng, n, length, keys, 0.06, 0.85, again)
        return streams.draw_recall(rng, n, length, keys, p_fill=0.05, p_again=again)
    if name == "leaky_mean":
        return streams.draw_leaky_mean(rng, n, length, margin=0.02)
    if name == "tally":
        warmup, events, queries = {
            64: ((0, 12), (2, 5), (1, 2)),
            128: ((0, 24), (2, 6), (1, 3)),
        }.get(length, ((0, 40), (3, 8), (1, 4)))
        repeats = (0, 0) if rng.random() < 0.6 else (1, 2)
        return streams.draw_tally(rng, n, length, warmup, events, queries, repeats)
    return text.draw_windows(rng, n, length, corpus)


def with_ends(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """``mask`` of tally streams and the filler behind each pattern: where an answer ends."""
    out = mask.copy()
    for row, answers in enumerate(mask):
        last = int(np.nonzero(answers)[0][-1])
        out[row, last + 1] = last + 2 < ids.shape[1]
    return out


def block_of_batches(
    rng: np.random.Generator, length: int, size: int, corpus: np.ndarray, mix: Mix = MIX
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """``BLOCK`` batches (ids uint8, loss weights fp32, task index uint8), each ``size`` streams."""
    share = np.array([mix[k][0] for k in NAMES]) * size
    rows = np.floor(share).astype(int)
    for i in np.argsort(rows - share)[: size - rows.sum()]:
        rows[i] += 1
    parts = []
    for name, n in zip(NAMES, rows, strict=True):
        ids, mask, meta = draw(name, rng, n * BLOCK, length, corpus)
        if name == "tally" and mix is not MIX:
            mask = with_ends(ids, mask)
        weight = mask.astype(np.float32)
        if name == "tally":
            weight *= np.where(meta["count"] > 0, 4, 1)
        parts.append((ids.astype(np.uint8), weight))
    out = []
    for i in range(BLOCK):
        ids, weights = [], []
        for (x, w), n, name in zip(parts, rows, NAMES, strict=True):
            ids.append(x[i * n : (i + 1) * n])
            piece = w[i * n : (i + 1) * n]
            weights.append(piece * (mix[name][1] / max(piece.sum(), 1)))
        task = np.repeat(np.arange(len(NAMES), dtype=np.uint8), rows)
        out.append((np.concatenate(ids), np.concatenate(weights), task))
    return out


def feed(queue: mp.Queue, stage: "mp.Value", plan: list, corpus: Path, seed: int, mix: Mix) -> None:
    """Endless producer of batches for the current stage."""
    rng, data = np.random.default_rng(seed), np.fromfile(corpus, np.uint8)
    while True:
        index = stage.value
        for batch in block_of_batches(rng, plan[index][1], plan[index][2], data, mix):
            queue.put((index, *batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="a key of tiny_models.SIZES")
    parser.add_argument("--corpus", type=Path, required=True, help="training text (split_docs.py)")
    parser.add_argument("--out", type=Path, required=True, help="folder to save the model in")
    parser.add_argument("--seconds", type=float, default=240.0, help="training time")
    parser.add_argument("--until", type=float, help="wall clock (epoch) at which training ends")
    parser.add_argument("--longest", type=int, default=512, choices=sorted(STAGES))
    parser.add_argument("--mix", default="tasks", choices=sorted(MIXES), help="shares of the tasks")
    parser.add_argument("--workers", type=int, default=3, help="generator processes")
    parser.add_argument("--batch-divisor", type=int, default=1, help="shrink batches (dry runs)")
    parser.add_argument("--tar", type=Path, help="also keep a tar of the latest save here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--bf16", action="store_true", help="store matrices in bf16")
    args = parser.parse_args()
    import torch
    import torch.nn.functional as F
    from byte_tokenizer import build as build_tokenizer
    from tiny_models import EOS, SIZES, build, shippable, use_fast_scans

    if args.name not in SIZES:
        parser.error(f"unknown model {args.name!r}; known: {', '.join(SIZES)}")
    began = time.time()
    end = args.until or began + args.seconds
    plan = [(f, t, max(8, b // args.batch_divisor)) for f, t, b in STAGES[args.longest]]
    edges = np.cumsum([f for f, _, _ in plan])
    stage, queue = mp.Value("i", 0), mp.Queue(4 * BLOCK)
    workers = [
        mp.Process(
            target=feed,
            args=(queue, stage, plan, args.corpus, 1000 * args.seed + i, MIXES[args.mix]),
            daemon=True,
        )
        for i in range(args.workers)
    ]
    for worker in workers:
        worker.start()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    use_fast_scans()
    graphs = device == "cuda" and not args.eager
    model = build(args.name).to(device).train()
    rate = torch.tensor(0.0, device=device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=rate if graphs else 1.0,
        betas=(0.9, 0.98),
        fused=device == "cuda",
        capturable=graphs,
    )
    no_mask = {"full_attention": None, "linear_attention": None, "mlp": None}

    def say(*words: object) -> None:
        print(f"[{args.name} {time.time() - began:5.0f}s]", *words, flush=True)

    def save() -> None:
        kept = {}
        if args.bf16:
            with torch.no_grad():
                for key, p in model.named_parameters():
                    kept[key] = p.detach().clone()
                    if p.ndim >= 2:
                        p.copy_(p.bfloat16())
        step_min = getattr(model.config, "time_step_min", None)
        shippable(model)
        if MIXES[args.mix] is not MIX:  # a tally's answer ends at the filler that follows it
            model.generation_config.eos_token_id = [EOS, *streams.FILL.tolist()]
            model.generation_config._from_model_config = False
        state = {
            k: v.bfloat16() if args.bf16 and v.ndim >= 2 else v.detach().clone()
            for k, v in model.state_dict().items()
        }
        model.save_pretrained(args.out, state_dict=state)
        build_tokenizer().save_pretrained(args.out)
        if args.tar:
            temporary = args.tar.with_name(args.tar.name + ".tmp")
            subprocess.run(["tar", "-cf", temporary, "-C", args.out, "."], check=True)
            os.replace(temporary, args.tar)
        model.train()
        if step_min is not None:
            model.config.time_step_min = step_min
        with torch.no_grad():
            for key, p in model.named_parameters():
                if key in kept:
                    p.copy_(kept[key])

    def one_step(ids: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=not graphs):
            logits = model(input_ids=ids, attention_mask=no_mask, use_cache=False).logits
        logits = logits[:, :-1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (loss * weight[:, :-1].flatten()).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        return loss.detach(), logits.detach()

    def capture(ids: torch.Tensor, weight: torch.Tensor) -> tuple:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimiser.zero_grad(set_to_none=True)
                one_step(ids, weight)
        torch.cuda.current_stream().wait_stream(side)
        optimiser.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss, logits = one_step(ids, weight)
        return graph, loss, logits

    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, graphs {graphs}")
    step = tokens = 0
    current, graph, mark, marked = -1, None, time.time(), 0
    start = time.time()
    while True:
        done = (time.time() - start) / max(end - start, 1e-9)
        if done >= 1:
            break
        wanted = int(np.searchsorted(edges, done, side="right"))
        stage.value = min(wanted, len(plan) - 1)
        value = SIZES[args.name][-1] * min(1.0, (step + 1) / 200)
        value *= 0.5 * (1 + math.cos(math.pi * done)) * 0.99 + 0.01
        if graphs:
            rate.fill_(value)
        else:
            for group in optimiser.param_groups:
                group["lr"] = value
        index, x, w, task = queue.get()
        if index < current:
            continue  # left over from the stage before
        x, w = torch.from_numpy(x), torch.from_numpy(w)
        if index != current:
            if current >= 1:
                save()
            graph = loss = logits = None
            ids, weight = x.long().to(device), w.to(device)
            if graphs:
                torch.cuda.empty_cache()
                try:
                    graph, loss, logits = capture(ids, weight)
                except Exception as error:  # any failed capture: start again without graphs
                    say("no CUDA graph:", repr(error)[:300])
                    for worker in workers:
                        worker.terminate()
                    again = [sys.executable, *sys.argv, "--eager", "--until", str(end)]
                    os.execv(sys.executable, again)
            current = index
        ids.copy_(x)
        weight.copy_(w)
        if graph is not None:
            graph.replay()
        else:
            optimiser.zero_grad(set_to_none=True)
            loss, logits = one_step(ids, weight)
        step += 1
        tokens += ids.numel()
        if device == "cuda" and step % 20 == 0:
            torch.cuda.synchronize()  # the clock must see work done, not work queued
        if time.time() - mark > 20 or device == "cpu":
            hit = (logits.argmax(-1) == ids[:, 1:]) & (weight[:, :-1] > 0)
            rows = torch.from_numpy(task).to(device)
            accuracy = []
            for i, name in enumerate(NAMES):
                of = (weight[:, :-1] > 0) & (rows == i)[:, None]
                accuracy.append(f"{name} {hit[of].float().mean().item():.3f}")
            pace = (time.time() - mark) / max(step - marked, 1) * 1e3
            say(
                f"step {step} T {ids.shape[1]} loss {loss.item():.4f} {pace:.1f} ms",
                f"{tokens / 1e6:.0f} Mtok q {queue.qsize()}",
                *accuracy,
            )
            mark, marked = time.time(), step
    for worker in workers:
        worker.terminate()
    save()
    say(f"saved {args.out}: {step} steps, {tokens} tokens, last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
