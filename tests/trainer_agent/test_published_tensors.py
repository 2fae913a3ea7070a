"""Which tensors are published, under which names, and with which bits."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.cut import Cut
from plait.errors import LayoutInvalid, PublishError, UsageError
from plait.grain import SlottedCut
from plait.layout import TensorSpec
from plait_trainer.dtypes import DtypeRule
from plait_trainer.live import LiveTensor, TensorView, layout_of, run_of
from plait_trainer.naming import canonical_names
from plait_trainer.share import Share, fingerprint_live
from plait_trainer.sources import MappingSource, ModuleSource, source_of
from plait_trainer.ties import without_aliases
from tests.trainer_agent.tiny_models import Tiny

AS_IS = DtypeRule(None)


def all_bits(tensor: LiveTensor) -> np.ndarray:
    return np.array(tensor.bits(0, tensor.spec.items))


def bits_by_name(source: ModuleSource | MappingSource) -> dict[str, bytes]:
    return {tensor.spec.name: all_bits(tensor).tobytes() for tensor in source.tensors()}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[1:5, 2:7],
        lambda t: t.flip(0),
        lambda t: t.reshape(2, 2, 3, 4)[:, :, 1],
        lambda t: t.permute(1, 0)[3],
        lambda t: t.expand(3, 4, 12),
        lambda t: t[0, 0],
    ],
    ids=["transposed", "strided", "block", "flipped", "3d slice", "column", "expanded", "scalar"],
)
def test_strided_tensors_are_published_by_their_logical_values(view: object) -> None:
    base = torch.arange(48, dtype=torch.float32).reshape(4, 12)
    tensor = view(base)  # type: ignore[operator]
    live = TensorView("x", tensor, tensor.dtype)
    logical = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    assert live.spec.shape == tuple(tensor.shape)
    items = logical.numel()
    for start, stop in [(0, items), (0, 1), (items - 1, items), (items // 3, 2 * items // 3 + 1)]:
        expected = logical[start:stop].numpy().view(np.uint32)
        np.testing.assert_array_equal(live.bits(start, stop), expected)


class Copies(TorchDispatchMode):
    """The items that operations of torch copied at once, at most."""

    most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and func.overloadpacket.__name__ in ("clone", "cat"):
            self.most = max(self.most, made.numel())
        return made


@given(st.data())
def test_a_run_of_a_strided_tensor_copies_hardly_more_than_itself(data: st.DataObject) -> None:
    sides = data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=5))
    order = data.draw(st.permutations(range(len(sides))))
    whole = torch.arange(math.prod(sides) * 2 ** len(sides)).view([2 * side for side in sides])
    cut = tuple(slice(0, side, data.draw(st.integers(1, 2))) for side in sides)
    tensor = whole[cut].permute(order)
    start = data.draw(st.integers(0, tensor.numel() - 1))
    stop = data.draw(st.integers(start, tensor.numel()))
    with Copies() as copies:
        found = run_of(tensor, start, stop)
    assert torch.equal(found, tensor.reshape(-1)[start:stop])
    assert copies.most <= 3 * (stop - start)


def test_padding_beside_a_view_never_reaches_the_fingerprint() -> None:
    buffer = torch.arange(32, dtype=torch.float32).reshape(4, 8)
    tensor = TensorView("scale", buffer[:, :6], torch.float32)
    share = Share.whole(layout_of([tensor]), SlottedCut(Cut("", ()), ()))
    before = fingerprint_live(share, {"scale": tensor})
    buffer[:, 6:] = float("nan")
    assert fingerprint_live(share, {"scale": tensor}) == before
    buffer[3, 5] += 1
    assert fingerprint_live(share, {"scale": tensor}) != before


def test_bits_of_every_pattern_pass_through_uncast() -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    live = TensorView("x", patterns, torch.bfloat16)
    np.testing.assert_array_equal(all_bits(live), np.arange(1 << 16, dtype=np.uint16))


def test_every_dtype_is_read_as_its_bits() -> None:
    for dtype in (torch.bool, torch.int8, torch.float8_e4m3fn, torch.float16, torch.int64,
                  torch.float64, torch.complex64):  # fmt: skip
        tensor = torch.arange(12).to(torch.float32).to(dtype).reshape(3, 4)
        live = TensorView("x", tensor, dtype)
        assert all_bits(live).tobytes() == raw(torch.view_as_real(tensor) if tensor.is_complex()
                                               else tensor)  # fmt: skip


def test_a_scalar_keeps_its_shape_and_empty_tensors_stay() -> None:
    state = {"scalar": torch.tensor(2.5), "none": torch.empty(0, 16), "one": torch.ones(1)}
    layout = layout_of(MappingSource(state, DtypeRule("BF16")).tensors())
    assert layout.tensors == (
        TensorSpec("none", "BF16", (0, 16)),
        TensorSpec("one", "BF16", (1,)),
        TensorSpec("scalar", "BF16", ()),
    )
    assert layout.total_elements == 2


def test_a_module_publishes_parameters_and_persistent_buffers() -> None:
    model = Tiny()
    specs = {t.spec.name: t.spec.dtype for t in ModuleSource(model, DtypeRule()).tensors()}
    assert specs == {
        "up.weight": "BF16", "up.bias": "BF16", "down.weight": "BF16", "down.bias": "BF16",
        "gain": "BF16", "seen": "F32",
    }  # fmt: skip
    assert "scratch" not in specs


def test_fp32_masters_are_published_as_their_bf16_rounding() -> None:
    model = Tiny()
    bits = bits_by_name(ModuleSource(model, DtypeRule("BF16")))
    assert bits["up.weight"] == raw(model.up.weight.detach().to(torch.bfloat16))


def test_an_override_keeps_a_router_bias_in_fp32() -> None:
    state = {
        "mlp.gate.bias": nn.Parameter(torch.tensor([6.8170, 6.8171])),
        "mlp.gate.weight": nn.Parameter(torch.zeros(2, 2)),
    }
    rule = DtypeRule("BF16", {"*.gate.bias": None})
    assert {t.spec.name: t.spec.dtype for t in MappingSource(state, rule).tensors()} == {
        "mlp.gate.bias": "F32",
        "mlp.gate.weight": "BF16",
    }
    with pytest.raises(UsageError, match="unknown dtype 'bfloat16'"):
        DtypeRule("bfloat16")


@pytest.mark.parametrize("dtype", ["I8", "U8", "BOOL", "I64", "C64"])
def test_weights_are_never_rounded_to_whole_numbers(dtype: str) -> None:
    with pytest.raises(UsageError, match=f"rounded to {dtype}"):
        DtypeRule(dtype)
    rule = DtypeRule("BF16", {"w": dtype})
    with pytest.raises(UsageError, match=f"'w' is torch.float32 and can't be rounded to {dtype}"):
        list(MappingSource({"w": torch.ones(4)}, rule).tensors())


def test_whole_numbers_are_never_rounded_at_all() -> None:
    rule = DtypeRule("BF16", {"n": "BF16", "m": "I64"})
    with pytest.raises(UsageError, match=r"'n' is torch\.int64 and can't be rounded to BF16"):
        list(MappingSource({"n": torch.ones(4, dtype=torch.int64)}, rule).tensors())
    [kept] = MappingSource({"m": torch.ones(4, dtype=torch.int64)}, rule).tensors()
    assert kept.spec.dtype == "I64"


def test_overrides_that_fit_nothing_are_known() -> None:
    rule = DtypeRule("BF16", {"*.gate.bias": None, "*.gait.bias": None})
    assert rule.unmatched(["mlp.gate.bias", "mlp.gate.weight"]) == ["*.gait.bias"]
    with pytest.raises(UsageError, match="dtypes is a list"):
        DtypeRule("BF16", ["*.bias"])  # type: ignore[arg-type]


def test_one_byte_floats_and_integers_are_never_cast_by_default() -> None:
    state = {"w": torch.ones(4).to(torch.float8_e4m3fn), "n": torch.ones(4, dtype=torch.int32)}
    found = {t.spec.name: t.spec.dtype for t in MappingSource(state, DtypeRule()).tensors()}
    assert found == {"w": "F8_E4M3", "n": "I32"}


@pytest.mark.parametrize(
    "prefix", ["", "_orig_mod.", "module.", "module._orig_mod.", "_fsdp_wrapped_module.module."]
)
def test_wrappers_prefixes_are_taken_off(prefix: str) -> None:
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert list(canonical_names({prefix + name: 0 for name in names})) == names


def test_wrappers_inside_a_name_are_taken_off_and_other_prefixes_are_not() -> None:
    assert list(canonical_names({"layers.0._orig_mod.w": 0, "base_model.model.b": 0})) == [
        "layers.0.w",
        "base_model.model.b",
    ]
    # Not a wrapper unless everything is inside it.
    assert list(canonical_names({"module.w": 0, "head.w": 0})) == ["module.w", "head.w"]


def test_two_names_that_become_one_are_refused() -> None:
    with pytest.raises(LayoutInvalid, match="one canonical name, 'w'"):
        canonical_names({"w": 0, "_orig_mod.w": 0})


def test_compiled_and_data_parallel_modules_publish_alike() -> None:
    model = Tiny()
    plain = bits_by_name(ModuleSource(model, DtypeRule()))
    assert bits_by_name(ModuleSource(torch.compile(model, backend="eager"), DtypeRule())) == plain
    assert bits_by_name(ModuleSource(nn.DataParallel(model), DtypeRule())) == plain


def test_a_shared_tensor_is_published_once() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embed"].weight  # type: ignore[assignment]
    assert list(bits_by_name(ModuleSource(model, AS_IS))) == ["embed.weight"]
    again = ModuleSource(model, AS_IS, ties={"embed.weight": "head.weight"})
    assert list(bits_by_name(again)) == ["head.weight"]


def test_disjoint_views_of_one_storage_are_two_tensors() -> None:
    storage = torch.arange(8.0)
    kept = without_aliases({"a": storage[:4], "b": storage[4:], "whole": storage}, {})
    assert list(kept) == ["a", "b", "whole"]


def test_declared_aliases_that_differ_in_one_bit_are_refused() -> None:
    embed = torch.zeros(4, 2)
    head = embed.clone()
    assert list(without_aliases({"embed": embed, "head": head}, {"head": "embed"})) == ["embed"]
    head[3, 1] = -0.0
    with pytest.raises(PublishError, match="'head' is tied to 'embed', but their bits differ"):
        without_aliases({"embed": embed, "head": head}, {"head": "embed"})


def test_equal_bits_alone_tie_nothing() -> None:
    state = {"embed": torch.ones(4, 2), "head": torch.ones(4, 2)}
    assert list(without_aliases(state, {})) == ["embed", "head"]


def test_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(PublishError, match="meta device"):
        list(ModuleSource(model, AS_IS).tensors())


def test_a_shard_is_never_taken_for_the_tensor() -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        shard = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
        with pytest.raises(PublishError, match="'w' is distributed"):
            TensorView("w", shard, shard.dtype)
    finally:
        distributed.destroy_process_group()


def test_something_that_holds_no_tensors_is_refused() -> None:
    with pytest.raises(UsageError, match="can't publish a int"):
        source_of(7, AS_IS, {}, None)  # type: ignore[arg-type]


def test_a_function_of_names_converts_a_state_dict() -> None:
    fused = nn.Parameter(torch.arange(12.0).reshape(6, 2))

    def split(state: object) -> dict[str, torch.Tensor]:
        return {"q": fused.detach()[:4], "k": fused.detach()[4:]}

    source = MappingSource({"qk": fused}, AS_IS, convert=split)
    assert bits_by_name(source) == {"q": raw(fused[:4]), "k": raw(fused[4:])}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_transformers_model_is_published_as_it_would_be_saved(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    model = transformers_model(kind, tied=tied)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in saved) is not tied
    source = ModuleSource(model, AS_IS)
    assert bits_by_name(source) == {name: raw(tensor) for name, tensor in saved.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert bits_by_name(source) == {name: raw(tensor) for name, tensor in saved.items()}


def test_a_tie_that_training_broke_is_refused() -> None:
    model = transformers_model("dense", tied=True)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    source = ModuleSource(model, AS_IS)
    assert "lm_head.weight" not in bits_by_name(source)
    with torch.no_grad():
        head.weight[1, 1] += 1
    with pytest.raises(PublishError, match=r"'lm_head\.weight' is tied to"):
        list(source.tensors())


def transformers_model(kind: str, *, tied: bool) -> "nn.Module":
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    experts = {"moe_intermediate_size": 12, "num_experts": 3, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
