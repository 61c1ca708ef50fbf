"""What programs do to modules besides calling them: copy, save, move, convert, train."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from ktransformers.operators.experts import KTransformersExperts
from tests.operators.layers import make_batch, make_experts, make_operator, relative_error


def _free(operator: KTransformersExperts) -> None:
    operator.orig_module.to("meta")


def test_state_dict_has_the_originals_names_and_tensors() -> None:
    module = make_experts()
    operator = make_operator(module)
    state = operator.state_dict(prefix="experts.")
    assert set(state) == {"experts.gate_up_proj", "experts.down_proj"}
    assert all(torch.equal(state[f"experts.{name}"], tensor) for name, tensor in module.state_dict().items())


def test_state_dict_is_empty_once_the_floats_are_freed() -> None:
    operator = make_operator()
    _free(operator)
    assert not operator.has_float_weights
    assert operator.state_dict() == {}


def test_loading_a_state_dict_is_refused_with_the_way_out() -> None:
    operator = make_operator()
    with pytest.raises(RuntimeError, match="undo the injection, load, and inject again"):
        operator.load_state_dict(operator.state_dict())


def test_a_deep_copy_computes_the_same_and_has_its_own_originals() -> None:
    operator = make_operator(backend="INT8")
    twin = copy.deepcopy(operator)
    batch = make_batch(operator.orig_module, 9)
    assert torch.equal(twin(*batch), operator(*batch))
    assert twin.orig_module is not operator.orig_module
    assert twin._kernel is operator._kernel  # packed weights are read-only and shared
    del operator
    assert twin(*batch).isfinite().all()


def test_a_deep_copy_of_a_torch_op_uses_its_own_weights() -> None:
    operator = make_operator(generate_op="KExpertsTorch")
    twin = copy.deepcopy(operator)
    batch = make_batch(operator.orig_module, 9)
    wanted = twin(*batch)
    operator.orig_module.get_parameter("down_proj").zero_()
    assert torch.equal(twin(*batch), wanted)


@pytest.mark.parametrize("save", [pickle.dumps, lambda operator: torch.save(operator, io.BytesIO()), copy.copy])
def test_pickling_is_refused_with_the_way_out(save: object) -> None:
    assert callable(save)
    with pytest.raises(TypeError, match="cannot be pickled: keep the checkpoint and the rules"):
        save(make_operator())


def test_a_change_of_dtype_reaches_the_originals_and_not_the_packed_weights() -> None:
    module = make_experts()
    operator = make_operator(module, backend="INT8")
    batch = make_batch(module, 9)
    before = operator(*batch)
    operator.to(torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert torch.equal(operator(*batch), before)
    operator.half().float().eval().to("cpu")
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_a_torch_op_follows_the_change_of_dtype() -> None:
    module = make_experts()
    operator = make_operator(module, generate_op="KExpertsTorch").to(torch.bfloat16)
    batch = make_batch(module, 9, dtype=torch.bfloat16)
    got = operator(*batch)
    assert got.dtype == torch.bfloat16
    assert relative_error(got, module(*batch)) < 0.01


def test_moving_the_model_leaves_the_originals_on_the_host() -> None:
    module = make_experts()
    operator = make_operator(module)
    operator.to("meta")  # any device that is not the CPU
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    assert list(operator.parameters()) == []


def test_training_mode_is_taken_over() -> None:
    assert make_operator(make_experts().train()).training
    assert not make_operator(make_experts().eval()).training
