"""The guard lists every reason at once and survives whatever a declaration or a host holds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_zoo import zoo_spec

from lowlat_plugin import (
    Code,
    Condition,
    Coverage,
    DeviceLimits,
    EngineFacts,
    KernelSpec,
    Requirements,
    VersionRange,
    deadline_for,
)
from lowlat_plugin.capabilities import CAPABILITIES
from lowlat_plugin.guard import check


def facts(**changes) -> EngineFacts:
    fields = {
        "architecture": "LlamaForCausalLM",
        "config": {"head_dim": 64, "hidden_act": "silu", "rope_scaling": None, "layer_types": ["full"]},
        "vendor": "cpu",
        "isa": "x86-64",
        "dtype": "float32",
        "weight_formats": frozenset({"plain"}),
        "kv_dtype": "float32",
        "page_size": 16,
        "resident_blocks": 100,
        "shared_memory": 100_000,
        "settings": {"graphs": "full"},
    }
    return EngineFacts(**(fields | changes))


def codes(spec: KernelSpec, engine: EngineFacts) -> list[str]:
    return [reason.code for reason in check(spec, engine)]


def test_what_fits_has_no_reasons():
    assert codes(zoo_spec(), facts()) == []


@pytest.mark.parametrize(
    ("spec_changes", "fact_changes", "code", "said"),
    [
        ({}, {"vendor": "nvidia"}, Code.VENDOR, "found nvidia, wanted cpu"),
        ({}, {"architecture": "BertModel"}, Code.ARCHITECTURE, "wanted LlamaForCausalLM"),
        ({}, {"isa": "sm_90"}, Code.ISA, "wanted x86-64"),
        ({"devices": {}}, {}, Code.ISA, "wanted nothing"),
        ({"devices": {"*": DeviceLimits(frozenset())}}, {}, Code.BAD_PLAN, "at least one"),
        ({}, {"tensor_parallel": 2}, Code.TENSOR_PARALLEL, "found 2, wanted 1"),
        ({"devices": {"*": DeviceLimits(frozenset({1}), resident_blocks=132)}}, {}, Code.RESIDENT_BLOCKS, "132"),
        ({"devices": {"*": DeviceLimits(frozenset({1}), shared_memory=232448)}}, {}, Code.SHARED_MEMORY, "232448"),
        ({}, {"dtype": "bfloat16"}, Code.DTYPE, "--dtype float32"),
        ({"requires": Requirements(weight_formats=frozenset({"q4_1"}))}, {}, Code.WEIGHT_FORMAT, "found plain"),
        ({"requires": Requirements(kv_dtypes=frozenset({"fp8"}))}, {}, Code.KV_LAYOUT, "found float32, wanted fp8"),
        ({"requires": Requirements(page_sizes=frozenset({1, 64}))}, {}, Code.KV_LAYOUT, "found 16, wanted 1, 64"),
        ({"requires": Requirements(page_sizes=frozenset())}, {}, Code.KV_LAYOUT, "wanted nothing"),
        ({}, {"contract": 2}, Code.CONTRACT_VERSION, "speaks contract version 2"),
        ({"contract": VersionRange(2, 5)}, {}, Code.CONTRACT_VERSION, "found 2 to 5, wanted 1"),
        ({"needs": frozenset({"telepathy"})}, {}, Code.CONTRACT_FEATURE, "telepathy"),
        ({}, {"capabilities": {"lora": 1}}, Code.CAPABILITY, "lora"),
        ({}, {"capabilities": {"speculative.verify": 2}}, Code.CAPABILITY, "at most version 1"),
        ({"covers": Coverage(layers=(0, 4))}, {}, Code.COVERAGE, "boundary"),
        ({"min_deadline_s": 20.0}, {"watchdog_s": 10.0}, Code.DEADLINE_TOO_SHORT, "at least 40 s"),
    ],
)
def test_each_misfit_is_named_with_what_was_found_and_wanted(spec_changes, fact_changes, code, said):
    reasons = check(zoo_spec(**spec_changes), facts(**fact_changes))
    assert code in {reason.code for reason in reasons}
    assert any(said in str(reason) for reason in reasons), [str(r) for r in reasons]


@pytest.mark.parametrize(
    ("condition", "value", "ok"),
    [
        (Condition(one_of=(64, 128)), 64, True),
        (Condition(one_of=(64, 128)), 80, False),
        (Condition(one_of=(1,)), True, False),
        (Condition(one_of=("silu",)), ["silu"], False),
        (Condition(one_of=(None,)), None, True),
        (Condition(one_of=(64,)), None, False),
        (Condition(at_most=8), 8, True),
        (Condition(at_most=8), 9, False),
        (Condition(at_least=2, multiple_of=4), 6, False),
        (Condition(multiple_of=4), "12", False),
        (Condition(multiple_of=4), float("nan"), False),
        (Condition(multiple_of=4), None, False),
        (Condition(multiple_of=4, present=False), None, True),
        (Condition(), {"any": "thing"}, True),
    ],
)
def test_conditions_on_fields(condition, value, ok):
    assert (condition.fault(value) is None) == ok


def test_all_reasons_come_at_once_and_unknown_names_are_reasons():
    spec = zoo_spec(
        requires=Requirements(
            dtypes=frozenset({"bfloat16"}),
            config={"head_dim": Condition(one_of=(128,)), "no_such_field": Condition(at_least=1)},
            settings={"graphs": Condition(one_of=("off",)), "no_such_setting": Condition(one_of=(1,))},
        )
    )
    engine = facts(tensor_parallel=3, capabilities={"lora": 1, "from tomorrow": 7})
    found = codes(spec, engine)
    assert found.count(Code.CONFIG_FIELD) == 2
    assert found.count(Code.SETTING) == 2
    assert found.count(Code.CAPABILITY) == 2
    assert {Code.DTYPE, Code.TENSOR_PARALLEL} <= set(found)
    assert any("not known here" in str(reason) for reason in check(spec, engine))


def test_a_malformed_declaration_is_a_reason_and_keeps_the_others():
    spec = msgspec.structs.replace(zoo_spec(), accepts=None, needs={"telepathy"})
    reasons = check(spec, facts(capabilities={"lora": 1}))
    assert Code.RAISED in {reason.code for reason in reasons}
    assert Code.CONTRACT_FEATURE in {reason.code for reason in reasons}


def test_every_known_capability_is_refused_unless_listed():
    for name in CAPABILITIES:
        engine = facts(capabilities={name: 1})
        assert codes(zoo_spec(accepts={}), engine) == [Code.CAPABILITY]
        assert codes(zoo_spec(accepts={name: 1}), engine) == []


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(value=junk, choices=st.lists(junk, max_size=3), low=st.none() | st.floats(), step=st.none() | st.integers(0, 9))
def test_no_value_crashes_a_condition_or_the_guard(value, choices, low, step):
    condition = Condition(one_of=tuple(choices) or None, at_least=low, multiple_of=step)
    spec = zoo_spec(requires=Requirements(config={"field": condition}))
    for reason in check(spec, facts(config={"field": value})):
        assert reason.code in (Code.CONFIG_FIELD, Code.RAISED)
        assert str(reason)


def test_deadlines_stay_below_the_watchdog():
    assert [deadline_for(w) for w in (None, 0, 5, 60, 300)] == [30, 30, 2.5, 30, 30]
