"""The commands as a user types them: help that teaches, JSON for machines, errors in one line, files where asked."""

import json
import pathlib

import pytest
from command_kit import lowlat
from typer.testing import CliRunner

from lowlat.bench import results
from lowlat.bench.cli import app
from lowlat.bench.load.traces import TraceError

COMMANDS = ("step", "ab", "regions", "serve", "replay", "compare", "gate", "report", "make-model")
CONFIGS = pathlib.Path(__file__).parents[2] / "benchmarks" / "configs"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_examples(command):
    text = lowlat(command, "--help").stdout
    assert "Example" in text
    assert "lowlat bench" in text


def test_no_command_is_left_out_of_these_tests():
    assert {command.name for command in app.registered_commands} == set(COMMANDS)


def test_step_prints_a_table_saves_and_prints_json(tmp_path):
    common = (
        "step",
        "--model",
        "tiny",
        "--rounds",
        2,
        "--steps",
        2,
        "--context",
        16,
        "--ceiling-gb",
        0.02,
        "--threads",
        1,
    )
    table = lowlat(*common, "--save", "--results", tmp_path)
    assert "| workload | general | torch-eager-graph | read-floor |" in table.stdout
    (path,) = tmp_path.glob("step-tiny-random-*.json")
    assert results.load(path).rows[0].workload == "tiny"
    printed = json.loads(lowlat(*common, "--json", "--arms", "general").stdout)
    assert [row["arm"] for row in printed["rows"]] == ["general"]
    assert printed["machine"]["threads"] == 1


def test_serve_and_replay_against_the_scripted_server(scripted, tmp_path):
    server = scripted("--ttft-ms", 5, "--itl-ms", 2)
    common = ("--url", server.url, "--weights", "real", "--json")
    serve = lowlat("serve", *common, "-c", "1,2", "-n", 3, "-i", 20, "-o", 5, "--goodput", "itl=200")
    rows = json.loads(serve.stdout)["rows"]
    assert {(row["metric"], row.get("concurrency", 1)) for row in rows} >= {
        (metric, users) for metric in ("ttft_ms", "tokens_per_s_user", "goodput") for users in (1, 2)
    }
    assert all(row["arm"] == "scripted" for row in rows)
    assert "3 requests" in serve.stderr
    prompts = {entry["first"] for entry in server.log() if entry["tokens"] == 5}
    assert len(prompts) == 6, "no two runs of a command share prompts: the second would find them in the cache"
    trace = tmp_path / "m.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 30, "output_length": 3, "hash_ids": [0]}) + "\n")
    opened = lowlat("serve", *common, "--trace", f"mooncake:{trace}")
    assert "open loop" in json.loads(opened.stdout)["rows"][0]["workload"]
    unsaid = lowlat("serve", "--url", server.url, "-n", 2, "-i", 20, "-o", 3)
    assert "weights not said" in unsaid.stdout
    assert "real weights" not in unsaid.stdout
    session = tmp_path / "s.jsonl"
    session.write_text(
        json.dumps({"timestamp": 0, "input": "hello", "output": "answer " * 4, "session_id": "s"}) + "\n"
    )
    replayed = lowlat("replay", session, *common)
    row = next(row for row in json.loads(replayed.stdout)["rows"] if row["metric"] == "interactivity_p90")
    assert row["details"]["runs"] == 1
    assert "1 runs" in replayed.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("step", "--model", "nothing"), "neither a preset"),
        (("step", "--model", "tiny", "--rows", "0"), "--rows"),
        (("step", "--model", "tiny", "--arms", "general,magic"), "no arm"),
        (("step", "--model", "tiny", "--arms", ","), "names no arm"),
        (("step", "--model", "tiny", "--dtype", "int4"), "--dtype"),
        (("step", "--model", "tiny", "--model-folder", "/nonexistent"), "--model-folder"),
        (("step", "--model", "smollm2,tiny", "--context", "5000"), "tiny holds 4096"),
        (("serve", "--url", "http://127.0.0.1:9"), "Is a server running there (lowlat serve)?"),
        (("serve", "--url", "127.0.0.1:9"), "http://HOST:PORT"),
        (("serve", "--json"), "--weights"),
        (("serve", "--weights", "fake"), "neither real nor random"),
        (("serve", "--rate", "1", "-c", "2"), "not both"),
        (("serve", "--rate", "1", "--trace", "azure:x"), "--time-scale"),
        (("serve", "--goodput", "fast"), "target"),
        (("compare", "/nonexistent/a.json", "b.json"), "error: /nonexistent/a.json: No such file"),
        (("replay", "/nonexistent"), "does not exist"),
        (("replay", ".", "--start", "0.7:0.2"), "--start"),
        (("compare", "/nonexistent", "x"), "nonexistent"),
        (("gate", "--baseline", "/nonexistent"), "no baseline"),
        (("gate", "--only", "vibes"), "--only"),
        (("regions", "--model", "tiny", "--arms", "general,transformers"), "no regions"),
        (("regions", "--model", "tiny", "--context", "5000"), "do not fit"),
        (("report", "--results", "/nonexistent"), "no folder"),
        (("ab", "--preset", "magic"), "--preset"),
        (("ab", "--users", "none"), "--users"),
        (("ab", "--users", "1"), "--kernels NAME"),
        (("make-model", "tiny", "."), "not empty"),
    ],
)
def test_wrong_calls_are_one_line_that_names_the_cause(arguments, message):
    got = lowlat(*arguments, code=1)
    assert message in got.stderr
    assert "Traceback" not in got.output


def test_replay_without_traces_says_where_to_put_them(monkeypatch):
    monkeypatch.delenv("LOWLAT_DATA", raising=False)
    assert "LOWLAT_DATA" in lowlat("replay", code=1).stderr
    assert issubclass(TraceError, ValueError)


def test_compare_gate_and_report_through_files(tmp_path):
    folder = tmp_path / "results"
    common = (
        "step",
        "--model",
        "tiny",
        "--rounds",
        3,
        "--steps",
        2,
        "--context",
        16,
        "--ceiling-gb",
        0.02,
        "--threads",
        1,
    )
    for _ in range(2):
        lowlat(*common, "--save", "--results", folder)
    first, second = sorted(folder.glob("*.json"))
    same = lowlat("compare", first, first)
    assert same.stdout.count("same") >= 2
    assert len(json.loads(CliRunner().invoke(app, ["compare", str(first), str(second), "--json"]).stdout)) == 3
    apart = tmp_path / "apart.json"
    apart.write_text(first.read_text().replace('"tiny"', '"other"'))
    nothing = lowlat("compare", first, apart, code=1)
    assert "One holds tiny by general, tiny by torch-eager-graph" in nothing.stderr
    assert "the other other by general" in nothing.stderr
    lowlat("gate", "--only", "bytes")
    found = json.loads(lowlat("gate", "--only", "bytes", "--json").stdout)
    assert {finding["verdict"] for finding in found} == {"ok"}
    from lowlat.bench.readme import BEGIN, END

    readme = tmp_path / "README.md"
    readme.write_text(f"# title\n{BEGIN}\n{END}\n")
    assert "not current" in lowlat("report", "--check", "--readme", readme, "--results", folder, code=1).stderr
    assert readme.read_text() == f"# title\n{BEGIN}\n{END}\n", "--check changes nothing"
    lowlat("report", "--readme", readme, "--results", folder)
    lowlat("report", "--check", "--readme", readme, "--results", folder)
    assert "step-tiny-random" in readme.read_text()
    drawn = lowlat("report", "--plots", tmp_path / "plots", "--results", folder).stdout.split()
    assert {pathlib.Path(path).suffix for path in drawn} == {".png", ".svg"}
    (folder / "broken.json").write_text("{}")
    assert "refused" in lowlat("report", "--results", folder, code=1).stderr


def test_a_made_model_opens_and_every_id_has_text(tmp_path):
    from lowlat.models.loading.checkpoint import open_checkpoint

    place = tmp_path / "model"
    lowlat("make-model", "tiny", place, "--max-context", 262144, "--dtype", "float32")
    checkpoint = open_checkpoint(place)
    assert checkpoint.config["max_position_embeddings"] == 262144
    assert checkpoint.config["vocab_size"] % 64 == 0
    vocab = checkpoint.config["vocab_size"]
    assert checkpoint.shape("lm_head.weight") == (vocab, 64)
    tokenizer = json.loads((place / "tokenizer.json").read_text())
    ids = {*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])}
    assert ids >= set(range(vocab))


def test_a_made_deepseek_is_measured_as_random(tmp_path):
    lowlat("make-model", "deepseek-v41-tiny", tmp_path / "made", "--layers", 1)
    common = ("--rounds", 1, "--steps", 1, "--context", 2, "--threads", 1, "--ceiling-gb", 0.01, "--json")
    got = lowlat(
        "step", "--model", "deepseek-v41-tiny", "--layers", 1, "--model-folder", tmp_path / "made", "--random-folder",
        "--arms", "general", *common,
    )  # fmt: skip
    result = json.loads(got.stdout)
    assert result["simulated"]["weights"] is True
    assert result["name"] == "step-deepseek-v41-tiny-1l-random"
    assert "not an empty folder" in lowlat("make-model", "deepseek-v41-tiny", tmp_path / "made", code=1).stderr


def test_a_made_model_of_experts_is_measured_beside_another(tmp_path):
    config = json.loads((CONFIGS / "qwen3-30b-a3b" / "config.json").read_text())
    small = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 8, "head_dim": 8, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | small | {"vocab_size": 49280}))
    made, folder = tmp_path / "made", tmp_path / "results"
    lowlat("make-model", tmp_path, made, "--layers", 2, "--dtype", "float32")
    got = lowlat(
        "step", "--model", f"tiny,{made}", "--arms", "general,torch-eager-graph", "--context", 16, "--rounds", 1,
        "--threads", 1, "--ceiling-gb", 0.05, "--save", "--results", folder,
    )  # fmt: skip
    assert "torch-eager-graph of made was left out: only lowlat's own runner computes made" in got.stderr
    (path,) = folder.glob("*.json")
    found = {(row["workload"], row["arm"]) for row in json.loads(path.read_text())["rows"]}
    assert found == {("tiny", "general"), ("tiny", "torch-eager-graph"), ("made", "general")}


def test_regions_writes_trace_and_picture(tmp_path, monkeypatch):
    monkeypatch.setattr("lowlat.bench.regions.SUM_TOLERANCE", 10.0)  # a busy machine: the sum is judged elsewhere
    trace, picture = tmp_path / "t.json", tmp_path / "p.png"
    got = lowlat(
        "regions",
        "--model",
        "tiny",
        "--context",
        16,
        "--instances",
        4,
        "--perfetto",
        trace,
        "--timeline",
        picture,
        "--threads",
        1,
    )
    assert "region" in got.stdout
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.is_file()
    assert picture.with_suffix(".svg").is_file()
