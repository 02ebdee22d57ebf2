"""What makes no sense is refused before anything is measured, with the option's name."""

import json

import pytest
from typer.testing import CliRunner

from lowlat.bench import ab, gate, step
from lowlat.bench.arms.base import ArmUnavailableError, StepCase, build_arm
from lowlat.bench.ceiling import Ceiling
from lowlat.bench.cli import app
from lowlat.bench.commands.common import numbers
from lowlat.bench.presets import PRESETS
from lowlat.bench.step import StepOptions, run_step

TINY = PRESETS["tiny"]


def test_options_that_describe_no_step_are_refused():
    for fields, match in (
        ({"rows": (0,)}, "rows"), ({"contexts": (5000,)}, "do not fit"), ({"device": "tpu"}, "neither"),
        ({"tp": 2}, "read-floor"), ({"steps": 100}, "at most 60"), ({"arms": ("magic",)}, "is no arm"),
    ):  # fmt: skip
        with pytest.raises((ValueError, RuntimeError), match=match):
            run_step(StepOptions(model="tiny", rounds=1, ceiling_gb=0.01, **fields))
    with pytest.raises(ArmUnavailableError, match="random weights"):
        build_arm("torch-eager-graph", StepCase(shape=TINY, model="smollm2"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, 1e-9])
def test_a_ceiling_of_no_size_is_refused(value, monkeypatch):
    monkeypatch.setattr(step, "measure_ceiling", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(ValueError, match="--ceiling-gb"):
        run_step(StepOptions(model="tiny", rounds=1, ceiling_gb=value))


RANGES = {
    "step": ("--layers", "--tp", "--rounds", "--steps", "--threads"),
    "regions": ("--layers", "--rows", "--context", "--threads", "--instances"),
    "ab": ("--input", "--output", "--requests", "--rounds", "--max-turns"),
    "make-model": ("--layers", "--max-context"),
}
WHOLE = [
    (command, option, value)
    for command, options in RANGES.items()
    for option in options
    for value in ("0", "-1", "nan")
]
FINITE = [
    (command, option, value)
    for command, option in (
        ("step", "--ceiling-gb"), ("ab", "--time-scale"), ("ab", "--least-covered"), ("compare", "--threshold"),
    )
    for value in ("nan", "inf", "-1", "-inf")
]  # fmt: skip
ARGUMENTS = {"make-model": ("tiny", "folder"), "compare": ("a.json", "b.json")}


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        *WHOLE,
        *FINITE,
        ("step", "--steps", "61"),
        ("step", "--threads", "1025"),
        ("regions", "--threads", "1025"),
        ("step", "--ceiling-gb", "1e12"),
        ("regions", "--spec", "magic"),
        ("step", "--seed", "-1"),
        ("ab", "--least-covered", "1.5"),
    ],
)
def test_values_out_of_range_are_usage_errors_that_name_the_option(command, option, value):
    got = CliRunner().invoke(app, [command, *ARGUMENTS.get(command, ()), option, value])
    assert got.exit_code == 2, got.output
    assert option in got.stderr
    assert "Traceback" not in got.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("step", "--rows", "nan"), "--rows"),
        (("step", "--rows", "1,-2"), "--rows"),
        (("step", "--context", "0"), "--context"),
        (("step", "--arms", "lowlat-mine"), "write plugin:lowlat-mine"),
        (("step", "--arms", "plugin:Mine"), "lower case"),
        (("regions", "--arms", "lowlat-mine"), "write plugin:lowlat-mine"),
        (("ab", "--users", "nan", "--kernels", "x"), "--users"),
        (("ab", "--users", "1", "--kernels", "x", "--arm", "mine"), "--arm 'mine'"),
        (("ab", "--users", "1", "--kernels", "x", "--arm", "general"), "without low-latency mode"),
        (
            ("step", "--model", "qwen3-0.6b", "--model-folder", "smollm2"),
            "smollm2 is no qwen3-0.6b: layers 30 instead of",
        ),
        (("step", "--layers", "2", "--model-folder", "smollm2"), "is no smollm2-2l: layers 30 instead of 2. "),
        (("regions", "--model", "tiny", "--model-folder", "smollm2"), "smollm2 is no tiny: layers 30 instead of 2"),
        (
            ("step", "--model", "deepseek-v41-tiny", "--context", "8", "--model-folder", "smollm2"),
            "smollm2 is no deepseek-v41-tiny: vocab 49152 instead of",
        ),
        (("step", "--model", ","), "names no model"),
        (("step", "--model", "tiny,{tmp_path}/tiny"), "two models of one name"),
        (("gate", "--update", "--baseline", "/proc/none/gate.json"), "--baseline"),
    ],
)
def test_names_and_lists_that_results_would_refuse_are_told_first(arguments, message, monkeypatch, tmp_path):
    other = tmp_path / "tiny" / "config.json"
    other.parent.mkdir()
    other.write_text(json.dumps(TINY.config()))
    monkeypatch.setattr(step, "measure_ceiling", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr(ab, "run_ab", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr(gate, "host_instructions", lambda *_, **__: pytest.fail("counted"))
    got = CliRunner().invoke(app, [argument.format(tmp_path=tmp_path) for argument in arguments])
    assert got.exit_code == 1, got.output
    assert message in got.stderr


def test_a_model_named_twice_is_measured_once(monkeypatch):
    monkeypatch.setattr(step, "measure_ceiling", lambda *_, **__: Ceiling(0.02, "a test", 1))
    outcome = run_step(StepOptions(model="tiny,tiny", arms=("read-floor",)))
    assert [row.workload for row in outcome.result.rows] == ["tiny"]
    assert outcome.result.name == "step-tiny-random"


def test_a_library_of_another_name_is_an_arm_by_its_plugin_name(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(ab, "run_ab", lambda sides, *_, **__: given.append(sides) or pytest.skip.Exception)
    CliRunner().invoke(app, ["ab", "--users", "1,1", "--kernels", "my-kernels"])
    (sides,) = given
    assert sides.on_arm == "plugin:my-kernels"
    assert sides.on == ("--low-latency", "require", "--kernels", "my-kernels")


def test_numbers_are_taken_once():
    assert numbers("4,1,4", "--users") == (4, 1)
