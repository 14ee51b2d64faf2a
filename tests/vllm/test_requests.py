"""Random keys from the requests, as the V2 model runner shows them, without vLLM."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from replayssm_quant.backends.vllm.cursors import (
    GroupRows,
    RowBuffers,
    SlotCursors,
    request_identity,
)
from replayssm_quant.formats.philox import request_key


def test_a_request_is_its_seed_or_the_id_that_its_sender_gave() -> None:
    assert request_identity("cmpl-1-a10d7dab", 7) == 7
    assert request_identity("cmpl-1-a10d7dab", 0) == 0
    assert request_identity("cmpl-1-a10d7dab", None) == "cmpl-1"
    assert request_identity("cmpl-1", None) == "cmpl-1"


class Base:
    """What is used of vLLM's model state."""

    def __init__(self, vllm_config: Any):
        self.vllm_config, self.max_num_reqs, self.device = vllm_config, 4, torch.device("cpu")
        self.added: list[int] = []

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        self.added.append(req_index)

    def prepare_attn(self, batch: Any, mode: Any, tables: Any, *args: Any, **kwargs: Any) -> Any:
        return "metadata", args, kwargs


class Builder:
    def __init__(self) -> None:
        self.planner = SimpleNamespace(request_keys=None)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Any:
    hybrid = ModuleType("mamba_hybrid")
    hybrid.MambaHybridModelState = Base  # type: ignore[attr-defined]
    parts = "vllm.v1.worker.gpu.model_states".split(".")
    for i in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), ModuleType(parts[i]))
    monkeypatch.setitem(sys.modules, ".".join([*parts, "mamba_hybrid"]), hybrid)
    package = "replayssm_quant.backends.vllm"
    metadata = ModuleType("metadata")
    metadata.SplitMamba2Builder = Builder  # type: ignore[attr-defined]
    metadata.SplitGDNBuilder = type("G", (Builder,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"{package}.metadata", metadata)
    monkeypatch.delitem(sys.modules, f"{package}.requests", raising=False)
    layer = SimpleNamespace(page=object(), config=SimpleNamespace(seed=5))
    context = {"attention": SimpleNamespace(), "plain": SimpleNamespace(page=None), "m": layer}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    module = importlib.import_module(f"{package}.requests")
    yield module.SplitModelState(config)
    sys.modules.pop(f"{package}.requests", None)


def request(name: str, seed: int | None) -> SimpleNamespace:
    return SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(seed=seed))


def groups(*builders: Any) -> list[list[Any]]:
    return [[SimpleNamespace(get_metadata_builder=lambda i, b=b: b)] for b in builders]


def test_builders_get_the_keys_in_batch_order_padding_included(state: Any) -> None:
    state.add_request(2, request("a-00000000", None))
    state.add_request(0, request("b-11111111", 9))
    state.add_request(3, request("c-22222222", None))
    assert state.added == [2, 0, 3]
    ours, other = Builder(), SimpleNamespace(planner=SimpleNamespace(request_keys="untouched"))
    batch = SimpleNamespace(
        num_reqs=3, num_reqs_after_padding=4, idx_mapping=torch.tensor([0, 3, 2, 1])
    )
    found = state.prepare_attn(batch, "mode", "tables", "slots", groups(ours, other), extra=1)
    assert found == ("metadata", ("slots", found[1][1]), {"extra": 1})
    wanted = [request_key(5, 9), request_key(5, "c"), request_key(5, "a")]
    keys = ours.planner.request_keys
    assert keys.shape == (4,) and keys[:3].tolist() == wanted
    assert other.planner.request_keys == "untouched"


def test_an_index_that_is_used_again_has_the_new_request_s_key(state: Any) -> None:
    state.add_request(1, request("old-00000000", None))
    state.add_request(1, request("new-00000000", None))
    builder = Builder()
    batch = SimpleNamespace(num_reqs=1, num_reqs_after_padding=1, idx_mapping=torch.tensor([1]))
    state.prepare_attn(batch, "mode", "tables", "slots", attn_groups=groups(builder))
    assert builder.planner.request_keys.tolist() == [request_key(5, "new")]


def test_more_rows_than_requests_fit_where_graphs_are_larger(state: Any) -> None:
    state.add_request(0, request("a", 1))
    builder = Builder()
    batch = SimpleNamespace(num_reqs=1, num_reqs_after_padding=9, idx_mapping=torch.tensor([0]))
    state.prepare_attn(batch, "mode", "tables", "slots", groups(builder))
    assert builder.planner.request_keys.shape == (9,)
    assert builder.planner.request_keys[0] == request_key(5, 1)


def planner(length: int = 4, base: int = 0, drafts: int = 0) -> SimpleNamespace:
    cursors = SlotCursors(8, length, stagger=False, seed=0, device="cpu")
    cursors.base.fill_(base)
    config = SimpleNamespace(buffer_len=length, stagger=False)
    return SimpleNamespace(
        request_keys=None, planned=None, drafts=drafts, layer=SimpleNamespace(config=config),
        buffers=RowBuffers(8, "cpu"), slot_cursors=lambda: cursors,
    )  # fmt: skip


def builder(found: SimpleNamespace) -> Builder:
    made = Builder()
    made.planner = found
    return made


@pytest.fixture
def on_gpu(state: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The state as it is on a GPU, its rows on the CPU nevertheless; with what a build sees."""
    module = sys.modules[type(state).__module__]
    monkeypatch.setattr(module, "GroupRows", lambda groups, rows, _: GroupRows(groups, rows, "cpu"))
    state.device, seen = SimpleNamespace(type="cuda"), []

    def prepare(self: Any, batch: Any, mode: Any, tables: Any, slots: Any, groups: Any) -> str:
        builders = [g.get_metadata_builder(0) for of_group in groups for g in of_group]
        seen.append([getattr(b.planner, "planned", None) for b in builders])
        return "metadata"

    monkeypatch.setattr(Base, "prepare_attn", prepare)
    return state, seen


def test_all_groups_of_a_step_are_planned_at_once(on_gpu: Any) -> None:
    state, seen = on_gpu
    for index, name in ((2, "a"), (0, "b")):
        state.add_request(index, request(f"{name}-00000000", None))
    planners = [planner(base=5), planner(base=99)]  # the first group's cursors count
    attention = SimpleNamespace(planner=SimpleNamespace())
    tables = [torch.tensor([[3], [6]]), torch.tensor([[0], [0]]), torch.tensor([[1, 9], [2, 9]])]
    batch = SimpleNamespace(
        num_reqs=2, num_reqs_after_padding=4, idx_mapping=torch.tensor([2, 0]),
        seq_lens=torch.tensor([9, 6], dtype=torch.int32),
    )  # fmt: skip
    of_groups = groups(builder(planners[0]), attention, builder(planners[1]))
    assert state.prepare_attn(batch, "mode", tables, "slots", of_groups) == "metadata"
    first, none, second = seen[0]
    assert none is None and (first[1], second[1]) == (0, 1) and first[0] is second[0]
    rows, other = first[0].rows(0, 4), second[0].rows(1, 4)
    assert rows.slots.tolist() == [3, 6, -1, -1] and other.slots.tolist() == [1, 2, -1, -1]
    assert rows.valid.tolist() == [3, 0, 0, 0] and rows.flush.tolist() == [True] + [False] * 3
    assert rows.key[:2].tolist() == [request_key(5, "a"), request_key(5, "b")]
    for found in planners:
        assert found.planned is None and found.request_keys.tolist() == rows.key.tolist()
    again = SimpleNamespace(**vars(batch))
    state.prepare_attn(again, "mode", tables, "slots", of_groups)
    assert seen[1][0][0] is first[0]  # at the same addresses


@pytest.mark.parametrize("other", [{"length": 5}, {"drafts": 3}], ids=["lengths", "drafts"])
def test_groups_that_differ_plan_for_themselves(on_gpu: Any, other: dict[str, int]) -> None:
    state, seen = on_gpu
    planners = [planner(drafts=other.get("drafts", 0)), planner(**other)]
    batch = SimpleNamespace(num_reqs=1, num_reqs_after_padding=1, idx_mapping=torch.tensor([1]))
    state.add_request(1, request("a-00000000", None))
    tables = [torch.ones(1, 1)] * 2
    state.prepare_attn(batch, "mode", tables, "slots", groups(*map(builder, planners)))
    assert seen == [[None, None]]
    assert [p.request_keys.tolist() for p in planners] == [[request_key(5, "a")]] * 2
