"""`KTransformersExperts` keeps transformers' contract, whatever computes it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV4Config, Llama4TextConfig, NemotronHConfig, Step3p7TextConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

import kt_kernel
from ktransformers.errors import UnsupportedModuleError
from ktransformers.operators.experts import KTransformersExperts
from ktransformers.operators.experts_torch import KExpertsTorch
from tests import models
from tests.operators.layers import KEY, make_batch, make_experts, make_operator, relative_error

TOLERANCE = {"BF16": 0.006, "INT8": 0.02}


@pytest.mark.parametrize("backend", ["BF16", "INT8"])
@pytest.mark.parametrize(
    "build",
    [
        models.make_qwen3_moe,
        models.make_mixtral,
        models.make_deepseek_v3,
        models.make_granite_moe,
        models.make_gpt_oss,
    ],
)
def test_the_kernel_agrees_with_transformers(build: Callable[..., Any], backend: str) -> None:
    module = make_experts(build)
    operator = make_operator(module, backend=backend)
    batch = make_batch(module, 40)
    assert relative_error(operator(*batch), module(*batch)) < TOLERANCE[backend]


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["KExpertsCPU", "KExpertsTorch"])
def test_results_have_the_shape_and_dtype_of_the_hidden_states(tokens: int, dtype: torch.dtype, op: str) -> None:
    module = make_experts()
    hidden, ids, weights = make_batch(module, tokens, dtype=dtype)
    got = make_operator(module, generate_op=op)(hidden, ids, weights)
    assert (got.shape, got.dtype, got.device) == (hidden.shape, dtype, hidden.device)


@pytest.mark.parametrize("op", ["KExpertsCPU", "KExpertsTorch"])
def test_ids_and_weights_of_other_dtypes_and_strides(op: str) -> None:
    module = make_experts()
    operator = make_operator(module, generate_op=op)
    hidden, ids, weights = make_batch(module, 12)
    wanted = operator(hidden, ids, weights)
    spread = torch.empty(12, 128)[:, ::2].copy_(hidden)
    assert torch.equal(operator(spread, ids.int(), weights), wanted)
    assert torch.equal(operator(hidden, ids.t().contiguous().t(), weights.t().contiguous().t()), wanted)
    rounded = weights.bfloat16()
    assert torch.equal(operator(hidden, ids, rounded), operator(hidden, ids, rounded.float()))


@pytest.mark.parametrize("op", ["KExpertsCPU", "KExpertsTorch"])
def test_ids_outside_the_experts_contribute_nothing_and_duplicates_add(op: str) -> None:
    module = make_experts()
    operator = make_operator(module, generate_op=op, backend="BF16")
    hidden, _, _ = make_batch(module, 3)
    ids = torch.tensor([[3, 3], [-1, 5], [8, 99]])
    weights = torch.tensor([[0.25, 0.5], [0.7, 0.3], [0.5, 0.5]])
    got = operator(hidden, ids, weights)
    alone = operator(
        hidden, torch.tensor([[3, 0], [5, 0], [0, 0]]), torch.tensor([[0.75, 0.0], [0.3, 0.0], [0.0, 0.0]])
    )
    torch.testing.assert_close(got, alone, rtol=1e-5, atol=1e-5)
    assert not got[2].any()


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_sentinel_ids_are_skipped_as_by_every_implementation_of_transformers(implementation: str) -> None:
    module = make_experts()
    hidden, ids, weights = make_batch(module, 10)
    ids[::3, 0], weights[::3, 0] = module.num_experts, 0.0
    module._is_expert_parallel = True
    module.config._experts_implementation = implementation
    got = make_operator(module, backend="BF16")(hidden, ids, weights)
    assert relative_error(got, module(hidden, ids, weights)) < TOLERANCE["BF16"]


def test_a_router_that_fills_fewer_slots_than_the_configuration_says() -> None:
    module = make_experts()
    operator = make_operator(module, backend="INT8")
    hidden, ids, weights = make_batch(module, 6)
    narrow = operator(hidden, ids[:, :1], weights[:, :1])
    assert torch.equal(narrow, operator(hidden, ids, torch.cat([weights[:, :1], torch.zeros(6, 1)], dim=1)))


@pytest.mark.parametrize("slots", [3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_that_fills_more_slots_than_the_configuration_says(slots: int, dtype: torch.dtype) -> None:
    module = make_experts()
    operator = make_operator(module, backend="BF16")
    hidden, ids, weights = make_batch(module, 6, k=slots, dtype=dtype)
    got = operator(hidden, ids, weights)
    assert got.dtype == dtype
    assert relative_error(got, module(hidden.float(), ids, weights.float())) < TOLERANCE["BF16"]


@pytest.mark.parametrize("op", ["KExpertsCPU", "KExpertsTorch"])
def test_wrong_shapes_are_named(op: str) -> None:
    module = make_experts()
    operator = make_operator(module, generate_op=op)
    hidden, ids, weights = make_batch(module, 6)
    for bad in ((hidden[:, :-1], ids, weights), (hidden[None], ids, weights), (hidden, ids[:3], weights[:3])):
        with pytest.raises(kt_kernel.InputError, match=rf"{KEY}.*\(tokens, 64\)"):
            operator(*bad)


def test_gradients_are_refused_not_cut_off() -> None:
    module = make_experts()
    operator = make_operator(module).train()
    hidden, ids, weights = make_batch(module, 4)
    hidden.requires_grad_()
    with pytest.raises(RuntimeError, match=r"computes no gradients.*inference_mode"):
        operator(hidden, ids, weights)
    with torch.no_grad():
        assert operator(hidden, ids, weights).shape == hidden.shape


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_that_would_hold_one_calls_results_is_refused() -> None:
    operator = make_operator()
    batch = make_batch(operator.orig_module, 4)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"undo the injection to use torch\.jit\.trace"):
        torch.jit.trace(operator, batch, check_trace=False)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("backend", ["BF16", "INT8"])
def test_biases_reach_the_kernel_where_both_layouts_would_fit(backend: str) -> None:
    # hidden = 2·intermediate: gate_up (E, H, 2I) is square, and nothing but the flag says which side is which.
    module = make_experts(models.make_gpt_oss, intermediate_size=32)
    operator, batch = make_operator(module, backend=backend), make_batch(module, 20)
    wanted = module(*batch)
    assert operator.describe()["op"] == "KExpertsCPU"
    assert relative_error(operator(*batch), wanted) < TOLERANCE[backend]
    module.gate_up_proj_bias.zero_()
    assert relative_error(module(*batch), wanted) > 0.1  # the case would show forgotten biases


@pytest.mark.parametrize("backend", ["BF16", "INT8"])
def test_experts_without_a_gate_run_in_the_kernel(backend: str) -> None:
    config = NemotronHConfig(n_routed_experts=4, hidden_size=64, moe_intermediate_size=48, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    module: Any = NemotronHExperts(config).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.12)
    operator, batch = make_operator(module, backend=backend), make_batch(module, 16)
    assert operator.describe()["op"] == "KExpertsCPU"
    assert relative_error(operator(*batch), module(*batch)) < TOLERANCE[backend]


def _make_normed_experts() -> Any:
    module = make_experts()
    module.has_post_expert_norm = True
    module.post_expert_norm = nn.RMSNorm(64, eps=1e-6).requires_grad_(False)
    module.post_expert_norm.weight.copy_(torch.linspace(0.5, 2.0, 64))
    module.config._experts_implementation = "batched_mm"  # the eager text of this class knows of no norm
    return module


@pytest.mark.parametrize("tokens", [0, 5, 12])
@pytest.mark.parametrize("backend", ["BF16", "INT8"])
def test_each_experts_output_is_normalised_behind_the_kernel(backend: str, tokens: int) -> None:
    module = _make_normed_experts()
    operator, batch = make_operator(module, backend=backend), make_batch(module, tokens)
    assert operator.describe()["op"] == "KExpertsCPU"
    got = operator(*batch)
    assert got.shape == batch[0].shape
    assert not tokens or relative_error(got, module(*batch)) < TOLERANCE[backend]


def test_a_norm_that_is_nan_at_zero_does_not_touch_experts_that_are_not_there() -> None:
    module = _make_normed_experts()
    module.post_expert_norm.eps = 0.0
    operator = make_operator(module, backend="BF16")
    hidden, ids, weights = make_batch(module, 4)
    ids[1, 0], ids[2] = 8, -1
    got = operator(hidden, ids, weights)
    assert got.isfinite().all()
    assert not got[2].any()
    assert got[1].any()


@pytest.mark.parametrize("kwargs", [{"backend": "BF16"}, {"backend": "INT8"}, {"generate_op": "KExpertsTorch"}])
def test_rows_that_come_sorted_by_expert(kwargs: dict[str, Any]) -> None:
    config = Llama4TextConfig(num_local_experts=3, hidden_size=64, intermediate_size=40, num_experts_per_tok=1)
    module: Any = Llama4TextExperts(config).requires_grad_(False)
    module.config = config
    for parameter in module.parameters():
        parameter.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.15)
    rows = torch.randn(3, 7, 64)
    rows[0, :4], rows[1, 2:] = 0.0, 0.0  # tokens that went elsewhere
    rows = rows.view(21, 64)
    operator, wanted = make_operator(module, **kwargs), module(rows)
    got = operator(rows)
    assert relative_error(got, wanted) < TOLERANCE.get(kwargs.get("backend", ""), 1e-6)
    assert not got[:4].any()
    assert operator(rows[:0]).shape == (0, 64)


@pytest.mark.parametrize("kwargs", [{"backend": "BF16"}, {"backend": "INT8"}, {"generate_op": "KExpertsTorch"}])
def test_experts_outside_the_interface_with_their_clamp_behind_the_activation(kwargs: dict[str, Any]) -> None:
    config = Step3p7TextConfig(num_local_experts=4, hidden_size=64, moe_intermediate_size=40)
    module: Any = Step3p7Experts(config, swiglu_limit=0.7).requires_grad_(False)
    module.config = config
    for parameter in module.parameters():
        parameter.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.2)
    operator, batch = make_operator(module, **kwargs), make_batch(module, 16)
    clamped = module(*batch)
    assert relative_error(operator(*batch), clamped) < TOLERANCE.get(kwargs.get("backend", ""), 1e-6)
    module.limit = float("inf")
    assert relative_error(module(*batch), clamped) > 0.3  # the case would show a forgotten clamp


def test_experts_that_need_ids_say_so() -> None:
    operator = make_operator()
    with pytest.raises(kt_kernel.InputError, match="takes hidden states, expert ids and routing weights"):
        operator(torch.zeros(2, 64))


def test_strict_refuses_what_the_kernel_does_not_compute_exactly() -> None:
    module = make_experts(hidden_act="mish")
    problems = KTransformersExperts.check(key=KEY, orig_module=module, config=module.config, kwargs={"strict": True})
    assert problems == [
        "strict: the kernel does not compute Qwen3MoeExperts exactly: its gate computes none of the kernel's formulas "
        "(hidden_act is 'mish')"
    ]
    with pytest.raises(UnsupportedModuleError, match="mish"):
        make_operator(module, strict=True)


def test_an_unknown_gate_runs_in_torch_exactly_with_one_line_for_all_layers(caplog: pytest.LogCaptureFixture) -> None:
    module = make_experts(hidden_act="mish")
    with caplog.at_level(logging.WARNING, logger="ktransformers"):
        first, second = make_operator(module, backend="AMXINT8"), make_operator(module, backend="AMXINT8")
    assert [record.message for record in caplog.records] == [
        "Qwen3MoeExperts runs in KExpertsTorch, not in the kernel: its gate computes none of the kernel's formulas "
        "(hidden_act is 'mish')."
    ]
    batch = make_batch(module, 20)
    assert first.describe()["op"] == "KExpertsTorch"
    assert relative_error(first(*batch), module(*batch)) < 1e-6
    assert second.active_backend == "torch on cpu (KExpertsTorch)"


def test_clamps_that_bite_reach_the_kernel() -> None:
    config = DeepseekV4Config(n_routed_experts=4, hidden_size=64, moe_intermediate_size=32, swiglu_limit=1.0)
    config.num_experts_per_tok, config._experts_implementation = 2, "eager"
    module: Any = DeepseekV4Experts(config).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.4)
    operator, batch = make_operator(module, backend="BF16"), make_batch(module, 16)
    clamped = module(*batch)
    assert relative_error(operator(*batch), clamped) < 0.01
    module.limit = 1e6
    assert relative_error(module(*batch), clamped) > 0.5  # the case would show a forgotten clamp


def test_short_prompts_go_to_the_kernel_and_long_ones_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_experts()
    operator = make_operator(
        module, backend="INT8", prefill_op="KExpertsTorch", prefill_device="cpu", prefill_threshold=10
    )
    assert operator.needs_original
    calls: list[int] = []
    forward: Any = KExpertsTorch.forward

    def noted(self: KExpertsTorch, hidden: torch.Tensor, *others: torch.Tensor) -> Any:
        calls.append(len(hidden))
        return forward(self, hidden, *others)

    monkeypatch.setattr(KExpertsTorch, "forward", noted)
    for tokens in (1, 10, 11, 30):
        batch = make_batch(module, tokens)
        exact = relative_error(operator(*batch), module(*batch)) < 1e-6
        assert exact == (tokens > 10)
    assert calls == [11, 30]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"prefill_op": "KExpertsTorch", "prefill_device": "cpu"},
        {"prefill_op": "KExpertsCPU", "prefill_device": "cpu", "prefill_threshold": 1},
        {"prefill_op": None, "prefill_threshold": 1},
    ],
)
def test_without_threshold_or_op_the_kernel_does_long_prompts_too(kwargs: dict[str, Any]) -> None:
    operator = make_operator(**kwargs)
    assert not operator.needs_original
    assert "KExpertsTorch" not in operator.active_backend


def test_a_prefill_device_the_host_lacks_leaves_prompts_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    operator = make_operator(prefill_op="KExpertsTorch", prefill_device="cuda", prefill_threshold=1, out_device="cuda")
    assert not operator.needs_original
    hidden, ids, weights = make_batch(operator.orig_module, 5)
    assert operator(hidden, ids, weights).device.type == "cpu"


def test_one_can_see_what_runs() -> None:
    operator = make_operator(backend="AMXInt8", threads=1)
    kernel = operator._kernel
    assert kernel is not None
    assert operator.active_backend == f"AMXINT8 → INT8 on {kernel.wrapper.tier}, 1 thread (KExpertsCPU)"
    described = operator.describe()
    assert described["backend"] == "AMXINT8"
    assert (described["format"], described["device"]) == ("INT8", "cpu")
    assert int(described["bytes"]) == kernel.wrapper.nbytes > 0
    assert operator.active_backend in repr(operator)


def test_switching_amx_and_avx2_off_changes_the_name_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUINFER_ENABLE_AVX2", "OFF")
    assert "on generic" in make_operator(backend="AMXINT8").active_backend


def test_sizes_are_where_transformers_has_them() -> None:
    module = make_experts()
    operator = make_operator(module)
    for name in ("num_experts", "hidden_dim", "intermediate_dim"):
        assert getattr(operator, name) == getattr(module, name)


def test_nan_in_the_weights_names_layer_expert_and_projection() -> None:
    module = make_experts()
    module.down_proj[5, 0, 0] = float("nan")
    with pytest.raises(kt_kernel.WeightsError, match=r"expert 5.*down"):
        make_operator(module)


def test_calls_from_several_threads_do_not_mix() -> None:
    module = make_experts()
    operator = make_operator(module, backend="INT8")
    batches = [make_batch(module, tokens, seed=tokens) for tokens in (1, 5, 40, 17)]
    wanted = [operator(*batch) for batch in batches]

    def repeat(index: int) -> bool:
        return all(torch.equal(operator(*batches[index]), wanted[index]) for _ in range(50))

    with ThreadPoolExecutor(len(batches)) as pool:
        assert all(pool.map(repeat, range(len(batches))))
