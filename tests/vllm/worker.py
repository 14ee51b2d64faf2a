"""Runs in the interpreter that has vLLM: ``worker.py JOB.json OUT.json``. No test lives here.

A job is a list of scenarios; each makes an engine, feeds it requests step by step, and reports the
tokens, the top-2 gaps and what the plugin did; ``then`` feeds more of them to the same engine.
``signatures`` instead reports how our overrides compare with the vLLM that is installed.
"""

import gc
import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from replayssm_quant.backends.vllm.generate import make_llm


def layers_of(engine: Any) -> list[Any]:
    context = engine.vllm_config.compilation_config.static_forward_context
    return [x for x in context.values() if getattr(x, "page", None) is not None]


def drive(llm: Any, scenario: dict[str, Any]) -> dict[str, Any]:
    """Add request i at step ``arrive[i]``; alone: each only when the one before has finished.

    tokens: one number, or one a request. seeds: sampling seed of each request.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    preempted = []
    original = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *a, **k: (
        preempted.append(request.request_id),
        original(request, *a, **k),
    )[1]
    prompts = scenario["prompts"]
    arrive = scenario.get("arrive", [0] * len(prompts))
    tokens = scenario["tokens"]
    tokens = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
    seeds = scenario.get("seeds", [None] * len(prompts))
    waiting = sorted(range(len(prompts)), key=lambda i: (arrive[i], i))
    common = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": 2}
    found: dict[int, Any] = {}
    memory: list[int] = []
    step, start = 0, time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        busy = engine.has_unfinished_requests()
        while waiting and arrive[waiting[0]] <= step and not (scenario.get("alone") and busy):
            i = waiting.pop(0)
            params = SamplingParams(**common, max_tokens=tokens[i], seed=seeds[i])
            engine.add_request(str(i), {"prompt_token_ids": prompts[i]}, params)
            busy = True
        for output in engine.step():
            if output.finished:
                found[int(output.request_id)] = output.outputs[0]
        if step % 100 == 99:
            memory.append(allocated())
        step += 1
    seconds = time.perf_counter() - start
    scheduler._preempt_request = original
    gaps = []
    for i in range(len(prompts)):
        tops = [sorted(x.logprob for x in d.values())[-2:] for d in found[i].logprobs]
        gaps.append([round(b - a, 6) for a, b in tops])
    return {
        "ids": [list(found[i].token_ids) for i in range(len(prompts))],
        "gaps": gaps,
        "preempted": len(preempted),
        "steps": step,
        "seconds": round(seconds, 3),
        "memory": memory,
        "prompts": prompts,
    }


def allocated() -> int:
    """Bytes of torch tensors on this process's GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def watch(log: dict[str, Any]) -> None:
    """Note the slots of prefills and the flushes of decode steps."""
    from replayssm_quant.backends.vllm.cursors import SlotCursors

    decode, prefill = SlotCursors.decode, SlotCursors.prefill

    def seen_decode(self: Any, out: Any, *args: Any) -> None:
        decode(self, out, *args)
        live = out.slots >= 0
        log["rows"] = log.get("rows", 0) + int(live.sum())
        log["flushes"] = log.get("flushes", 0) + int(out.flush.sum())

    def seen_prefill(self: Any, *args: Any) -> Any:
        rows = prefill(self, *args)
        fresh = (args[1] == args[2]).tolist()
        slots = [s for s, f in zip(rows.slots.tolist(), fresh, strict=True) if f]
        log.setdefault("slots", []).extend(slots)
        keys = [k for k, f in zip(rows.key.tolist(), fresh, strict=True) if f]
        log.setdefault("keys", []).extend(keys)
        log["folded"] = log.get("folded", 0) + sum(
            v for v, f in zip(rows.valid.tolist(), fresh, strict=True) if not f
        )
        return rows

    SlotCursors.decode, SlotCursors.prefill = seen_decode, seen_prefill


def run(scenario: dict[str, Any], log: dict[str, Any]) -> dict[str, Any]:
    log.clear()
    llm = make_llm(scenario["model"], scenario["options"], scenario["engine"])
    layers = layers_of(llm.llm_engine)
    log.clear()
    if scenario.get("poison"):  # what an earlier tenant may leave: NaN in every format
        for layer in layers:
            layer.kv_cache[1].fill_(255)
    result = drive(llm, scenario)
    for name, more in scenario.get("then", {}).items():  # on the same engine, its slots used before
        result[name] = drive(llm, scenario | more)
    config = llm.llm_engine.vllm_config
    result |= {
        "layers": len(layers),
        "page": [layer.page.nbytes for layer in layers],
        "strides": [layer.kv_cache[1].stride(0) for layer in layers],
        "classes": sorted({type(layer).__name__ for layer in layers}),
        "block_size": config.cache_config.block_size,
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "log": dict(log),
    }
    return result


def signatures() -> dict[str, Any]:
    """Overridden methods that vLLM lacks, or whose parameters ours cannot take."""
    from vllm.version import __version__

    from replayssm_quant.backends.vllm import gdn, layer, mamba2, metadata, plugin

    ours = [
        (mamba2.SplitMambaMixer2, [layer.SplitLayer, mamba2.SplitMambaMixer2]),
        (gdn.SplitQwenGatedDeltaNet, [layer.SplitLayer, gdn.SplitQwenGatedDeltaNet]),
        (metadata.SplitMamba2Builder, [metadata.SplitMamba2Builder]),
        (metadata.SplitGDNBuilder, [metadata.SplitGDNBuilder]),
        (metadata.SplitMamba2Backend, [metadata.SplitMamba2Backend]),
        (metadata.SplitGDNBackend, [metadata.SplitGDNBackend]),
    ]
    try:  # the V2 model runner needs Triton
        from replayssm_quant.backends.vllm import requests

        ours.append((requests.SplitModelState, [requests.SplitModelState]))
    except ImportError:
        pass
    new = {"split", "make_page", "metadata", "heads", "before", "store", "reserve"}
    problems, checked = [], 0
    for cls, sources in ours:
        base = cls.__mro__[cls.__mro__.index(sources[-1]) + 1 :]
        base = next(c for c in base if c not in sources)
        for source in sources:
            for name, value in vars(source).items():
                if not inspect.isfunction(value) or name in new:
                    continue
                stock = getattr(base, name, None)
                if name.startswith("_") and name != "__init__" and stock is None:
                    if name in ("_prefill", "_decode", "_heads", "_seed", "_batch_keys"):
                        continue
                if stock is None:
                    problems.append(f"{cls.__name__}.{name}: vLLM has no such method")
                    continue
                checked += 1
                mine = inspect.signature(value).parameters
                if any(p.kind == p.VAR_POSITIONAL for p in mine.values()):
                    continue
                theirs = inspect.signature(stock).parameters
                if list(mine)[1:] != [p for p in theirs if p != "self"]:
                    problems.append(f"{cls.__name__}.{name}: {list(mine)} for {list(theirs)}")
    targets = []
    for patch in plugin.PATCHES:
        module, path = patch.target.split(":")
        owner = __import__(module, fromlist=["x"])
        for part in path.split("."):
            owner = getattr(owner, part)
        targets.append(patch.target)
    return {"version": __version__, "problems": problems, "checked": checked, "patches": targets}


def main() -> None:
    job, out = Path(sys.argv[1]), Path(sys.argv[2])
    if job.name == "signatures":
        out.write_text(json.dumps(signatures()))
        return
    log: dict[str, Any] = {}
    watch(log)
    results = {}
    for scenario in json.loads(job.read_text()):
        try:
            results[scenario["name"]] = run(scenario, log)
        except Exception as error:
            results[scenario["name"]] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        out.with_suffix(".part").write_text(json.dumps(results))
        out.with_suffix(".part").replace(out)


if __name__ == "__main__":
    main()
