"""The result format: stamping, named refusals, and files that come back as they were written."""

import json
import subprocess
import sys

import msgspec
import pytest

from lowlat.bench import results, stamp
from lowlat.bench.results import ResultError, Simulated, load, load_all, new_result, row_from_samples, save


@pytest.fixture
def good(monkeypatch):
    monkeypatch.setenv("LOWLAT_COMMIT", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setenv("LOWLAT_TREE", "feedfacefeedface")
    result = new_result("dense-step", simulated=Simulated(weights=True), read_ceiling_tb_s=4.54, gpus=0)
    result.rows.append(
        row_from_samples(
            [650.0, 648.0, 655.0],
            workload="llama-1b",
            arm="lowlat-nvidia",
            metric="step_us",
            context=1024,
            dtype="bfloat16",
            bytes=2_505_000_000,
            read_ceiling_tb_s=4.54,
        )
    )
    return result


def test_round_trip_and_name(good, tmp_path):
    path = save(good, tmp_path)
    assert path.name.startswith("dense-step-")
    assert path.name.endswith(f"-{good.date[:10]}.json")
    assert load(path) == good
    assert good.rows[0].ceiling_fraction == pytest.approx(2.505e9 / 650e-6 / 4.54e12, abs=1e-4)
    assert good.tree == "feedfacefeedface"


def test_a_second_run_of_a_day_overwrites_nothing(good, tmp_path):
    first, second = save(good, tmp_path), save(good, tmp_path)
    assert second.name == first.name.replace(".json", "-2.json")
    assert len(load_all(tmp_path)) == 2


def test_the_example_of_the_format_is_accepted(tmp_path):
    example = {
        "schema": 1,
        "name": "dense-step",
        "date": "2026-12-01T10:00:00Z",
        "commit": "abcdef0123",
        "command": "lowlat bench step",
        "machine": {"gpu": "NVIDIA H200", "gpus": 1, "driver": "580.1", "cpu": "x", "torch": "2.11", "python": "3"},
        "simulated": {"weights": True, "acceptance": False},
        "read_ceiling_tb_s": 4.54,
        "rows": [
            {
                "workload": "llama-1b", "rows": 1, "context": 1024, "tp": 1, "dtype": "bfloat16",
                "arm": "lowlat-nvidia",
                "metric": "step_us", "concurrency": 1, "median": 650.1, "low": 648.0, "high": 655.2, "samples": 40,
                "bytes": 2505000000, "ceiling_fraction": 0.849, "note": "",
            }
        ],
    }  # fmt: skip
    path = tmp_path / "example.json"
    path.write_text(json.dumps(example))
    got = load(path)
    assert got.machine.gpu == "NVIDIA H200"
    assert results.file_name(got) == "dense-step-nvidia-h200-2026-12-01.json"
    got.machine.gpus = 4
    assert results.file_name(got) == "dense-step-4x-nvidia-h200-2026-12-01.json"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda r: setattr(r, "commit", ""), "missing-commit"),
        (lambda r: setattr(r, "command", "  "), "missing-command"),
        (lambda r: setattr(r, "date", "yesterday"), "bad-date"),
        (lambda r: setattr(r, "schema", 2), "unknown-schema"),
        (lambda r: setattr(r, "name", "Dense Step"), "bad-name"),
        (lambda r: setattr(r.machine, "cpu", ""), "missing-machine"),
        (lambda r: setattr(r.machine, "torch", ""), "missing-versions"),
        (lambda r: (setattr(r.machine, "gpus", 1), setattr(r.machine, "gpu", "H200")), "missing-versions"),
        (lambda r: r.rows.clear(), "no-rows"),
        (lambda r: (setattr(r, "dirty", True), setattr(r, "tree", "")), "missing-tree"),
        (lambda r: setattr(r, "read_ceiling_tb_s", None), "missing-ceiling"),
        (lambda r: setattr(r.rows[0], "arm", "magic"), "unknown-arm"),
        (lambda r: setattr(r.rows[0], "metric", "vibes"), "unknown-metric"),
        (lambda r: setattr(r.rows[0], "low", 651.0), "interval-disordered"),
        (lambda r: setattr(r.rows[0], "median", float("nan")), "not-finite"),
        (lambda r: setattr(r.rows[0], "samples", 0), "no-samples"),
        (lambda r: setattr(r.rows[0], "workload", ""), "missing-workload"),
        (lambda r: setattr(r.rows[0], "dtype", ""), "missing-dtype"),
        (lambda r: setattr(r.rows[0], "bytes", None), "missing-bytes"),
        (lambda r: setattr(r.rows[0], "ceiling_fraction", 1.4), "above-ceiling"),
    ],
)
def test_each_lack_is_refused_by_name_and_nothing_is_written(good, tmp_path, change, code):
    change(good)
    with pytest.raises(ResultError) as caught:
        save(good, tmp_path)
    assert [p.code for p in caught.value.problems] == [code]
    assert code in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", ["machine", "commit", "command", "simulated", "date"])
def test_a_file_without_a_field_is_refused_by_name(good, tmp_path, field):
    raw = msgspec.to_builtins(good)
    del raw[field]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ResultError) as caught:
        load(path)
    assert caught.value.problems[0].code == f"missing-{field}"
    assert str(path) in str(caught.value)


def test_misspelt_fields_and_garbage_are_refused(good, tmp_path):
    raw = msgspec.to_builtins(good)
    raw["rows"][0]["contxt"] = 5
    path = tmp_path / "x.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ResultError, match="contxt"):
        load(path)
    path.write_text("")
    with pytest.raises(ResultError, match="empty"):
        load(path)


def test_plugin_arms_are_accepted(good):
    good.rows[0].arm = "plugin:my-kernels"
    assert results.problems(good) == []


def test_stamp_of_this_checkout(monkeypatch):
    monkeypatch.delenv("LOWLAT_COMMIT", raising=False)
    monkeypatch.delenv("LOWLAT_TREE", raising=False)
    got = stamp.source_stamp()
    assert len(got.commit) == 40
    assert got.tree == stamp.source_hash()
    machine = stamp.this_machine(0)
    assert machine.cpu
    assert machine.torch
    assert machine.gpus == 0


def test_the_command_is_what_was_measured_not_where_it_was_written(monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["/opt/bin/lowlat", "bench", "step", "--results", "/x y", "--output", "1", "--plots=p"]
    )
    assert stamp.command_line() == "lowlat bench step --output 1"
    monkeypatch.setattr(sys, "argv", ["packages/lowlat/src/lowlat/cli/main.py", "bench", "ab"])
    assert stamp.command_line() == "lowlat bench ab"
    for secret in (["--api-key", "sk-1"], ["--api-key=sk-1"]):
        monkeypatch.setattr(sys, "argv", ["/venv/bin/lowlat", "bench", "serve", *secret, "-c", "1"])
        assert stamp.command_line() == "lowlat bench serve -c 1"
    script = stamp.repository_root() / "benchmarks" / "host_cost.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--name", "a b"])
    assert stamp.command_line() == "python benchmarks/host_cost.py --name 'a b'"


def test_source_hash_sees_contents_and_paths(tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "benchmarks").mkdir()
    file = tmp_path / "packages" / "a.py"
    file.write_text("x = 1\n")
    first = stamp.source_hash(tmp_path)
    (tmp_path / "packages" / "notes.txt").write_text("not a source")
    assert stamp.source_hash(tmp_path) == first
    file.write_text("x = 2\n")
    second = stamp.source_hash(tmp_path)
    file.rename(tmp_path / "packages" / "b.py")
    assert len({first, second, stamp.source_hash(tmp_path)}) == 3


def test_results_import_needs_neither_torch_nor_numpy():
    code = (
        "import sys, lowlat.bench.results, lowlat.bench.stats\n"
        "loaded = {m.split('.')[0] for m in sys.modules}\n"
        "assert not loaded & {'torch', 'numpy', 'httpx', 'matplotlib', 'typer'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
