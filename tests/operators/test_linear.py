"""`KTransformersLinear` in the place of an `nn.Linear`: numbers, shapes, dtypes, devices, and the life of a module."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import kt_kernel
from ktransformers.errors import UnsupportedModuleError
from ktransformers.operators.linear import KTransformersLinear
from ktransformers.operators.options import LinearOptions

KEY = "model.layers.0.self_attn.q_proj"


class Doubled(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def _linear(*, bias: bool = True, dtype: torch.dtype = torch.float32, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    torch.manual_seed(0)
    return kind(96, 70, bias=bias, dtype=dtype).requires_grad_(False)


def _operator(module: nn.Module, **kwargs: Any) -> KTransformersLinear:
    operator = KTransformersLinear(KEY, orig_module=module, **kwargs)
    operator.load()
    return operator


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize(("backend", "tolerance"), [("BF16", 0.006), ("INT8", 0.02)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_agrees_with_the_original(bias: bool, dtype: torch.dtype, backend: str, tolerance: float) -> None:
    module = _linear(bias=bias, dtype=dtype)
    operator = _operator(module, backend=backend)
    x = _x(2, 5, 96, dtype=dtype)
    got = operator(x)
    assert (got.shape, got.dtype) == ((2, 5, 70), dtype)
    assert _error(got, module(x)) < tolerance
    assert operator.describe()["op"] == "KLinearCPU"
    assert operator.describe()["format"] == backend


@pytest.mark.parametrize("shape", [(96,), (0, 96), (1, 0, 96), (1, 1, 96), (2, 3, 4, 96)])
def test_takes_what_the_original_takes(shape: tuple[int, ...]) -> None:
    module = _linear()
    got, wanted = _operator(module)(_x(*shape)), module(_x(*shape))
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype


def test_the_torch_op_gives_the_originals_bits() -> None:
    module = _linear()
    operator = _operator(module, generate_op="KLinearTorch")
    assert torch.equal(operator(_x(3, 96)), module(_x(3, 96)))
    assert operator.needs_original
    assert operator.describe()["runs"] == "torch on cpu (KLinearTorch)"


def test_upstreams_name_of_the_cpu_op_is_an_alias() -> None:
    assert _operator(_linear(), generate_op="KLinearCPUInfer").describe()["op"] == "KLinearCPU"
    assert LinearOptions.problems({"generate_op": "KLinearCPUInfer", "prefill_op": "KLinearTorch"}) == []


def test_long_inputs_stream_float_weights() -> None:
    module = _linear()
    operator = _operator(module, backend="INT8", prefill_op="KLinearTorch", prefill_device="cpu", prefill_threshold=8)
    assert operator.needs_original
    long = _x(3, 3, 96)
    torch.testing.assert_close(operator(long), module(long))
    assert not torch.allclose(operator(long[:2]), module(long[:2]), rtol=1e-5)


def test_a_subclass_with_a_forward_of_its_own_computes_it_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    module = _linear(kind=Doubled)
    operator = _operator(module)
    assert torch.equal(operator(_x(3, 96)), module(_x(3, 96)))
    assert "Doubled is an nn.Linear with a forward of its own" in caplog.text
    with pytest.raises(UnsupportedModuleError, match=r"strict: Doubled is an nn\.Linear with a forward"):
        _operator(module, strict=True)


@pytest.mark.parametrize(
    ("module", "kwargs", "said"),
    [
        (nn.LayerNorm(4), {}, "is a LayerNorm, no nn.Linear"),
        (nn.Linear(4, 4), {"generate_op": "KLinearMarlin"}, "KLinearMarlin needs a kernel of another device"),
        (nn.Linear(4, 4), {"generate_op": "KLinearCpu"}, "Did you mean KLinearCPU"),
        (nn.Linear(4, 4), {"generate_op": "KExpertsCPU"}, "there is no op 'KExpertsCPU'"),
        (nn.Linear(4, 4), {"generate_device": "cuda"}, "KLinearCPU runs on the CPU, write cpu"),
        (nn.Linear(4, 4), {"out_devise": "cpu"}, "did you mean 'out_device'"),
    ],
)
def test_check_refuses_with_the_way_out(module: nn.Module, kwargs: dict[str, Any], said: str) -> None:
    problems = KTransformersLinear.check(key=KEY, orig_module=module.to("meta"), config=None, kwargs=kwargs)
    assert len(problems) == 1
    assert said in problems[0]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_inputs_or_outputs_is_refused() -> None:
    for module in (nn.Linear(0, 4), nn.Linear(4, 0)):
        (problem,) = KTransformersLinear.check(key=KEY, orig_module=module, config=None, kwargs={})
        assert "there is nothing to compute" in problem


def test_an_input_of_another_width_is_refused_by_name() -> None:
    with pytest.raises(kt_kernel.InputError, match=rf"{KEY}: x \(…, 96\) was expected, got \(3, 95\)"):
        _operator(_linear())(_x(3, 95))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gradients_and_tracing_are_refused_with_the_way_out() -> None:
    operator = _operator(_linear())
    with pytest.raises(RuntimeError, match="KTransformersLinear, which computes no gradients"):
        operator(_x(3, 96).requires_grad_())
    with torch.no_grad():
        assert operator(_x(3, 96).requires_grad_()).isfinite().all()
    with pytest.raises(RuntimeError, match=r"undo the injection to use torch\.jit\.trace"):
        torch.jit.trace(operator, _x(3, 96))


def test_state_dict_has_the_originals_names_and_goes_with_its_floats() -> None:
    module = _linear()
    operator = _operator(module)
    state = operator.state_dict(prefix="q_proj.")
    assert set(state) == {"q_proj.weight", "q_proj.bias"}
    assert torch.equal(state["q_proj.weight"], module.weight)
    module.to("meta")
    assert operator.state_dict() == {}
    with pytest.raises(RuntimeError, match="undo the injection, load, and inject again"):
        operator.load_state_dict(state)


def test_copies_share_packed_weights_and_pickling_is_refused() -> None:
    operator = _operator(_linear(), backend="INT8")
    twin = copy.deepcopy(operator)
    assert twin._kernel is operator._kernel
    assert twin.orig_module is not operator.orig_module
    assert torch.equal(twin(_x(3, 96)), operator(_x(3, 96)))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(operator)


def test_a_change_of_dtype_reaches_the_original_and_not_the_packed_weights() -> None:
    operator = _operator(_linear(), backend="INT8")
    before = operator(_x(3, 96))
    operator.to(torch.bfloat16)
    assert operator.weight.dtype == torch.bfloat16
    assert torch.equal(operator(_x(3, 96)), before)


def test_float_weights_are_seen_but_neither_exchanged_nor_changed_behind_its_back() -> None:
    module = _linear()
    operator = _operator(module)
    assert operator.weight is module.weight
    assert operator.bias is module.bias
    assert (operator.in_features, operator.out_features) == (96, 70)
    operator.weight = module.weight  # what tying the same weights again does
    with pytest.raises(RuntimeError, match="its weight cannot be replaced: undo the injection"):
        operator.weight = nn.Parameter(torch.ones(70, 96))
    kept = module.bias.data
    module.bias.data = torch.zeros(70)  # what Jamba's mixer does around a call
    with pytest.raises(RuntimeError, match="its float weights were exchanged since"):
        operator(_x(3, 96))
    module.bias.data = kept
    assert operator(_x(3, 96)).isfinite().all()


def test_weights_that_are_not_finite_are_refused_by_place() -> None:
    module = _linear()
    module.weight[3, 4] = torch.inf
    with pytest.raises(kt_kernel.WeightsError, match="linear weight at channel 3, input 4 is infinite"):
        _operator(module)
