"""`lowlat plugins ...`, the template project, and the admin route of a live server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

import lowlat_plugin
from lowlat.cli import plugins
from lowlat_plugin.scaffold import render, write_project

pytest.importorskip("lowlat_cpu", reason="install examples/lowlat-cpu")


def run(*args: str):
    return CliRunner().invoke(plugins.app, list(args))


def installed_in(site: Path, name: str, entry: str) -> dict[str, str]:
    """An environment in which a distribution of this name is installed, without pip."""
    info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[lowlat.kernels]\n{name} = {entry}\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(Path(__file__).parent)]), "OMP_NUM_THREADS": "1"}


def lowlat(*args: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lowlat.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=600)


def test_list_shows_what_is_installed():
    found = run("list")
    assert found.exit_code == 0
    assert "lowlat-cpu/llama-gguf" in found.stdout
    libraries = json.loads(run("list", "--json").stdout)["libraries"]
    assert (
        "LlamaForCausalLM" in next(e for e in libraries if e["key"] == "lowlat-cpu/llama-gguf")["spec"]["architectures"]
    )


def test_list_and_doctor_say_where_libraries_are_when_none_is_installed(monkeypatch):
    monkeypatch.setattr(lowlat_plugin, "discover", lowlat_plugin.Registry)
    assert "examples/lowlat-cpu" in run("list").stdout
    nothing = lowlat_plugin.Report(policy="auto", state="general", on=False)
    monkeypatch.setattr(plugins, "_diagnose", lambda config: nothing)
    report = run("doctor", "--model", "smollm2")
    assert report.exit_code == 1
    assert "none is installed" in report.stdout
    assert "examples/lowlat-cpu" in report.stdout


def test_list_shows_what_could_not_be_loaded(tmp_path):
    env = installed_in(tmp_path, "torn-kernels", "no_such_module_here:SPECS")
    done = lowlat("plugins", "list", env=env, cwd=tmp_path)
    assert done.returncode == 1
    assert "torn-kernels" in done.stderr
    assert "no_such_module_here" in done.stderr
    assert "lowlat-cpu/llama-gguf" in done.stdout


def test_check_gives_a_result_for_each_check_and_fails_for_a_broken_library(tmp_path):
    found = run("check", "lowlat-cpu", "--only", "refusals", "--only", "fallback", "--json")
    assert [r["status"] for r in json.loads(found.stdout)] == ["passed", "passed"]
    assert run("check", "lowlat-cpu", "--only", "nonsense").exit_code == 2
    (tmp_path / "zoo_specs.py").write_text("from plugin_zoo import zoo_spec\nSPECS = zoo_spec('NeverRight')\n")
    env = installed_in(tmp_path, "never-right", "zoo_specs:SPECS")
    done = lowlat("plugins", "check", "never-right", "--only", "outputs", env=env, cwd=tmp_path)
    assert done.returncode == 1
    assert "max-abs" in done.stdout


def test_faults_that_the_kit_plants_are_not_told_as_news(tmp_path):
    done = lowlat("plugins", "check", "lowlat-cpu", "--only", "updates", env=dict(os.environ), cwd=tmp_path)
    assert done.returncode == 0
    assert "disabled by name" in done.stdout
    assert "cannot run here" not in done.stderr


def test_doctor_says_active_or_why_not(tmp_path):
    model = ("--model", "smollm2", "--threads", "1", "--dtype", "bfloat16", "--json")
    refused = json.loads(run("doctor", *model, "--kernels", "lowlat-cpu").stdout.splitlines()[-1])
    assert refused["state"] != "active"
    assert {r["code"] for c in refused["candidates"] for r in c["reasons"]} == {"dtype", "kv-layout"}
    active = run("doctor", "--model", "smollm2", "--threads", "1", "--dtype", "float32")
    assert active.exit_code == 0
    assert "lowlat-cpu/llama-gguf: active" in active.stdout
    assert "decode/8x8" in active.stdout
    wrong = run("doctor", *model, "--kernels", "no-such")
    assert wrong.exit_code == 1
    assert "not-found" in wrong.stdout


def test_new_writes_a_project_that_passes_its_own_checks(tmp_path):
    made = run("new", "my-kernels", "--folder", str(tmp_path / "project"))
    assert made.exit_code == 0
    assert "pip install" in made.stdout
    assert (tmp_path / "project/.github/workflows/ci.yml").exists()
    again = run("new", "my-kernels", "--folder", str(tmp_path / "project"))
    assert again.exit_code == 1
    assert isinstance(again.exception, FileExistsError)
    site = tmp_path / "site"
    env = installed_in(site, "my-kernels", "my_kernels.specs:SPECS")
    env["PYTHONPATH"] += os.pathsep + str(tmp_path / "project/src")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path / "project", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 passed, 2 skipped" in done.stdout, done.stdout  # one needs ranks, one 16-bit kernels


@pytest.mark.parametrize("name", ["", "My-Kernels", "a_b", "9lives", "a--b", "../up"])
def test_new_refuses_names_that_are_none(name, tmp_path):
    with pytest.raises(ValueError, match="lower-case"):
        write_project(name, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_template_is_clean_code(tmp_path):
    write_project("my-kernels", tmp_path)
    for path, text in render("my-kernels").items():
        assert "@NAME@" not in text, path
        assert "@MODULE@" not in text, path
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "120", "--select", "E,F,W,B,UP"]
    ruff.append(str(tmp_path))
    done = subprocess.run(ruff, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def server():
    command = [sys.executable, "-m", "lowlat.cli.main", "serve", "--model", "smollm2", "--dtype", "float32"]
    command += [
        "--threads",
        "1",
        "--kv-tokens",
        "4096",
        "--low-latency",
        "require",
        "--port",
        "0",
        "--log-format",
        "json",
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env)
    try:
        assert process.stderr is not None
        loggers = set()
        for line in process.stderr:
            said = json.loads(line)  # the engine's lines have the front's form
            loggers.add(said["logger"])
            if said["event"] == "ready":
                break
        else:
            pytest.fail("the server did not start")
        assert {"lowlat.plugins", "lowlat.server"} <= loggers
        with httpx.Client(base_url=said["address"], timeout=120) as client:
            yield client
    finally:
        process.terminate()
        process.wait(120)


def counted(client: httpx.Client, path: str, reason: str) -> float:
    start = f'lowlat_low_latency_steps_total{{path="{path}",reason="{reason}"}}'
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(start))


def complete(client: httpx.Client) -> str:
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 6}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_the_admin_route_shows_and_switches_and_metrics_count(server):
    report = server.get("/v1/admin/low-latency").json()
    assert (report["state"], report["kernels"], report["on"]) == ("active", "lowlat-cpu/llama-gguf", True)
    with_kernels = complete(server)
    wait_until(lambda: counted(server, "plugin", "covered") == 5)
    assert server.post("/v1/admin/low-latency", json={"on": False}).json()["on"] is False
    assert complete(server) == with_kernels
    wait_until(lambda: counted(server, "general", "switched-off") >= 5)
    assert counted(server, "plugin", "covered") == 5
    assert server.post("/v1/admin/low-latency", json={"on": True}).json()["on"] is True
    assert complete(server) == with_kernels
    wait_until(lambda: counted(server, "plugin", "covered") == 10)


@pytest.mark.parametrize("body", ["{}", '{"on": 1}', '{"on": true, "off": false}', "nonsense", ""])
def test_bad_switches_are_a_400_that_names_the_field(server, body):
    answer = server.post("/v1/admin/low-latency", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "on"
    assert server.get("/v1/admin/low-latency").json()["on"] is True


def wait_until(condition) -> None:
    for _ in range(2400):
        if condition():
            return
        time.sleep(0.05)
    assert condition()
