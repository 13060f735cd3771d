"""The allow-lists: explicit, resolvable, harmless."""

import pytest
import torch

from shoal.dag.ir import experts, quantized, random
from shoal.dag.ir.operators import CORE, FULL, OperatorError, allowed, check, resolve, takes_key


def test_every_listed_operator_resolves() -> None:
    for target in FULL | CORE:
        assert callable(resolve(target))


def test_no_listed_operator_changes_its_arguments() -> None:
    for target in FULL | CORE:
        if not target.startswith("shoal."):
            assert not resolve(target)._schema.is_mutable, target


def test_no_listed_operator_is_random_unless_it_takes_a_key() -> None:
    # Their own dropout argument is refused at capture where it would draw.
    recurrent = {f"aten.{n}.input" for n in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
    attention = {"aten.scaled_dot_product_attention.default"}
    for target in (FULL | CORE) - recurrent - attention:
        if not target.startswith("shoal."):
            assert torch.Tag.nondeterministic_seeded not in resolve(target).tags, target


@pytest.mark.parametrize(
    "target",
    [
        "aten.from_file.default",
        "aten.add_.Tensor",
        "aten.item.default",
        "aten.empty.memory_format",
        "aten._grouped_mm.default",
        "aten.histc.default",
        "transformers.grouped_mm_fallback.default",
        "aten.as_strided.default",
        "aten.set_.source_Storage",
        "aten.native_dropout.default",
        "prims.add.default",
        "os.system.default",
        "shoal.step_key.default",
        "shoal.dropout",
        "builtins.eval",
        "",
        "aten.linear.default.__globals__",
    ],
)
def test_anything_else_is_refused_by_name(target: str) -> None:
    assert not allowed(target, "full")
    assert not allowed(target, "core")
    with pytest.raises(OperatorError, match=f"{target}.*allow-list"):
        resolve(target)


def test_core_has_no_composite_operator() -> None:
    assert CORE <= FULL | CORE
    check("aten.linear.default", "full")
    with pytest.raises(OperatorError, match="'core'"):
        check("aten.linear.default", "core")


def test_random_operators_and_those_of_experts_and_narrow_weights_are_shoals_own() -> None:
    assert resolve("shoal.dropout.default") is random.dropout
    assert takes_key("shoal.dropout.default")
    assert not takes_key("aten.linear.default")
    assert resolve("shoal.grouped_mm.default") is experts.grouped_mm
    assert not takes_key("shoal.grouped_mm.default")
    own = random.OPERATORS.keys() | experts.OPERATORS.keys() | quantized.OPERATORS.keys()
    for listed in (FULL, CORE):
        assert {t for t in listed if t.startswith("shoal.")} == {f"shoal.{n}.default" for n in own}
