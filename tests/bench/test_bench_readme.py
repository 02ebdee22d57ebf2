"""The README's tables: whole models as one user sees them, each line one run and the newest of its kind."""

import pytest
from result_kit import machine, result, row

from lowlat.bench import readme, report


def test_the_readme_block_is_replaced_and_staleness_is_seen(tmp_path):
    found = [(tmp_path, result(row("general", 1000.0), name="step-llama-1b"))]
    old = f"# x\n\n{readme.BEGIN}\nold\n{readme.END}\n\nafter\n"
    fresh = readme.replace_block(old, readme.performance_block(found))
    assert fresh.startswith("# x\n\n")
    assert fresh.endswith("\n\nafter\n")
    assert "old" not in fresh
    assert readme.replace_block(fresh, readme.performance_block(found)) == fresh
    for bad in ("no marks", old + readme.END, f"{readme.END}\n{readme.BEGIN}"):
        with pytest.raises(ValueError, match="two lines"):
            readme.replace_block(bad, "x")


def lines_of(*results):
    text = readme.performance_block([("", one) for one in results])
    return [line for line in text.splitlines() if line.startswith("| [")]


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def speed(arm, median, **fields):
    return row(arm, median, metric="tokens_per_s_user", **{"context": 0, **fields})


def test_a_line_holds_one_run_of_one_model_and_links_to_it(tmp_path):
    one = result(
        row("general", 1000.0, bytes=10**9, ceiling_fraction=0.5), row("lowlat-nvidia", 700.0),
        row("read-floor", 500.0), row("vllm", 1.0),
        row("general", 4000.0, context=8192), row("general", 3000.0, rows=8, concurrency=8),
        name="step-llama-1b-random",
    )  # fmt: skip
    (line,) = lines_of(one)
    anchor = report.result_anchor(one)
    assert cells(line) == [
        f"[Llama-3.2-1B]({readme.PAGE}#{anchor})", "1,024", "1 × H200", "random", "model", "1000, 50%", "700.0",
        "500.0", "2026-12-01",
    ]  # fmt: skip
    assert f'<a id="{anchor}">' in report.full_report([(tmp_path, one)])


@pytest.mark.parametrize("later", [1100.0, 900.0])
def test_a_later_run_takes_the_place_of_an_earlier_one_whichever_is_faster(later):
    before = result(row("general", 1000.0), row("torch-compile", 1500.0), name="step-presets-random")
    after = result(row("general", later), name="step-llama-1b-random", date="2026-12-02T10:00:00Z")
    for given in ((before, after), (after, before)):
        (line,) = lines_of(*given)
        assert report.number(later) in line
        assert "1000" not in line
        assert "1500" not in line, "no column comes from another run"
        assert line.endswith("| 2026-12-02 |")


def test_lines_that_differ_in_model_context_machine_weights_or_what_is_timed_all_stand():
    def step(value, *, name="step-x", workload="llama-1b", tp=1, simulated=None, **fields):
        one = result(row("general", value, workload=workload, tp=tp, **fields), name=name)
        one.simulated.weights = simulated is None
        return one

    two = step(5.0, name="tensor-parallel", tp=2)
    two.machine.gpus = 2
    cpu = step(6.0, name="step-cpu")
    cpu.machine = machine(threads=2)
    cpu.machine.gpus, cpu.machine.cpu = 0, "AMD EPYC"
    found = lines_of(
        step(1.0), step(2.0, name="step-y", workload="qwen3-8b"), step(3.0, name="general-step"),
        step(4.0, name="step-z", simulated=False), two, cpu, step(7.0, name="step-long", context=100000),
    )  # fmt: skip
    values = [(cells(line)[1], cells(line)[2], cells(line)[3], cells(line)[4], cells(line)[5]) for line in found]
    assert sorted(values, key=lambda value: float(value[-1])) == [
        ("1,024", "1 × H200", "random", "model", "1.00"),
        ("1,024", "1 × H200", "random", "model", "2.00"),
        ("1,024", "1 × H200", "random", "engine", "3.00"),
        ("1,024", "1 × H200", "real", "model", "4.00"),
        ("1,024", "2 × H200", "random", "engine", "5.00"),
        ("1,024", "AMD EPYC, 2 threads", "random", "model", "6.00"),
        ("100,000", "1 × H200", "random", "model", "7.00"),
    ]
    assert "AMD EPYC" in found[-1], "GPUs come first"


@pytest.mark.parametrize(
    ("name", "workload"),
    [
        ("expert-window", "experts-window"), ("draft-proposals", "markov"), ("attention-region", "attention-region"),
        ("dense-step", "llama-1b"), ("step-deepseek-v41-1l-random", "deepseek-v41-1l"), ("stepwise", "llama-1b"),
    ],
)  # fmt: skip
def test_kernels_alone_and_models_cut_short_stand_on_the_results_page_alone(name, workload, tmp_path):
    one = result(row("lowlat-nvidia", 17.0, workload=workload), name=name)
    assert lines_of(one) == []
    assert "17.0" in report.full_report([(tmp_path, one)])


def test_speeds_of_one_user_by_model_and_load():
    ab = result(
        speed("general", 1143.0, workload="8192 in, 1024 out, 1 users"),
        speed("lowlat-nvidia", 1213.0, workload="8192 in, 1024 out, 1 users"),
        speed("general", 777.0, workload="8192 in, 1024 out, 2 users", concurrency=2), name="ab-8k1k-llama-1b",
    )  # fmt: skip
    forced = result(
        speed("general", 1965.0, workload="8192 in, 1024 out, 1 users"), name="ab-8k1k-llama-1b-simulated-acceptance"
    )
    forced.simulated.acceptance = True
    agents = result(speed("general", 21.0, workload="agent, 1 runs"), name="ab-agent-smollm2")
    guesses = result(
        speed("general", 2198.0, workload="smollm2, temperature 0"),
        speed("general", 4535.0, workload="smollm2, temperature 0", draft="dspark"),
        speed("general", 3386.0, workload="smollm2, temperature 0", draft="ngram"), name="speculation",
    )  # fmt: skip
    alone = result(
        speed("general", 20.0, workload="smollm2"), speed("transformers", 18.0, workload="smollm2"), name="cpu-speed"
    )
    found = [cells(line) for line in lines_of(ab, forced, agents, guesses, alone)]
    assert [(cell[0].partition("]")[0][1:], *cell[1:2], *cell[3:-1]) for cell in found] == [
        ("Llama-3.2-1B", "8,192 tokens in, 1,024 out", "random", "1143", "1213", "", ""),
        ("Llama-3.2-1B", "8,192 tokens in, 1,024 out", "random, simulated acceptance", "1965", "", "", ""),
        ("SmolLM2-135M", "one request", "random", "20.00", "", "", "18.00"),
        ("SmolLM2-135M", "recorded agent runs", "random", "21.00", "", "", ""),
        ("SmolLM2-135M", "temperature 0", "random", "2198", "", "4535 (dspark), 3386 (ngram)", ""),
    ]


def test_the_readme_of_this_repository_is_current():
    from lowlat.bench.results import load_all
    from lowlat.bench.stamp import repository_root

    place = repository_root() / "README.md"
    if not place.is_file() or readme.BEGIN not in place.read_text(encoding="utf-8"):
        pytest.skip("the README has no performance table")
    text = place.read_text(encoding="utf-8")
    found = load_all()
    assert readme.replace_block(text, readme.performance_block(found)) == text, "run: lowlat bench report --readme"
    page = (place.parent / readme.PAGE).read_text(encoding="utf-8")
    assert report.full_report(found) == page, "run: lowlat bench report --readme"


def test_the_documented_ab_is_the_command_that_was_run():
    from lowlat.bench.results import load_all
    from lowlat.bench.stamp import repository_root

    commands = [one.command for one in report.newest(load_all()) if one.name == "ab-8k1k-llama-1b"]
    assert len(commands) == 1
    text = (repository_root() / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert f"\n{commands[0]}\n" in text
