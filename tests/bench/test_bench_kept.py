"""What was measured before a run ended early is kept and marked, and a folder that takes no results is told first."""

import json
import signal

import pytest
from command_kit import lowlat

from lowlat.bench import ab, ceiling, random_v41, results, step
from lowlat.bench.arms import base
from lowlat.bench.keeper import UNFINISHED, Keeper, finish
from lowlat.bench.load.records import Record
from lowlat.bench.region_recorder import Span
from lowlat.bench.results import Simulated, new_result, row_from_samples

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = ("step", "--model", "tiny", "--context", "16", "--ceiling-gb", "0.01", "--steps", "2", "--threads", "1")
REGIONS = ("regions", "--model", "tiny", "--context", "16", "--instances", "6", "--threads", "1")
AB = ("ab", "--kernels", "lowlat-cpu", "--weights", "real", "--input", "8", "--output", "3", "--rounds", "2")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWLAT_COMMIT", "0123456789abcdef")
    return tmp_path / "results"


def only(folder):
    (path,) = folder.glob("*.json")
    return results.load(path)


class Clock:
    """An arm whose steps take a fixed time, and that ends by `error` at its measurement number `at`."""

    note, weight_bytes = "", None

    def __init__(self, at, error):
        self.at, self.error, self.count = at, error, 0

    def measure(self):
        self.count += 1
        if self.count == self.at:
            raise self.error
        return [100.0, 100.0]

    def close(self):
        self.closed = True


def played(monkeypatch, at, error=None):
    """Arms of steps that take no time; `transformers` ends at its measurement number `at`."""
    built = []

    def build(name, case):
        built.append(Clock(at if name == "transformers" else 0, error or KeyboardInterrupt()))
        return built[-1]

    monkeypatch.setattr(step, "build_arm", build)
    return built


# --- steps


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(128 + signal.SIGTERM)])
def test_whole_rounds_of_an_interrupted_first_case_are_kept(folder, monkeypatch, error):
    built = played(monkeypatch, 1 + 2 * 2 + 1, error)  # a warm-up, two rounds, and in the third
    arms = ("--arms", "general,transformers,read-floor", "--rounds", "5")
    got = lowlat(*STEP, *arms, "--save", "--results", folder, code=130 if isinstance(error, KeyboardInterrupt) else 143)
    kept = only(folder)
    assert kept.incomplete == ("interrupted" if isinstance(error, KeyboardInterrupt) else "ended with code 143")
    assert {row.arm: row.samples for row in kept.rows} == {"general": 8, "transformers": 8}
    assert "marked incomplete" in got.stderr
    assert all(arm.closed for arm in built)


def test_earlier_cases_and_models_are_kept(folder, monkeypatch):
    built = []

    def build(name, case):
        if case.context == 64:
            raise KeyboardInterrupt
        built.append(case.context)
        return Clock(0, None)

    monkeypatch.setattr(step, "build_arm", build)
    lowlat(*STEP, "--context", "16,32,64", "--arms", "general", "--save", "--results", folder, code=130)
    kept = only(folder)
    assert [row.context for row in kept.rows] == built == [16, 32]
    assert kept.incomplete == "interrupted"


def test_a_state_before_the_end_is_marked_in_case_nothing_can_mark_it_later(folder, monkeypatch):
    played(monkeypatch, 0)
    states = []

    def saving(result, *rest, **more):
        states.append(result)
        return results.save(result, *rest, **more)

    monkeypatch.setattr("lowlat.bench.keeper.save", saving)
    lowlat(*STEP, "--rows", "1,2", "--arms", "general", "--save", "--results", folder)
    assert [state.incomplete for state in states] == [UNFINISHED] * 3 + [""]
    assert [len(state.rows) for state in states] == [1, 2, 2, 2]
    assert only(folder).incomplete == ""


def test_without_a_file_the_rounds_so_far_are_shown(monkeypatch, folder):
    played(monkeypatch, 4)
    shown = lowlat(*STEP, "--arms", "general,transformers", code=130)
    assert "**Incomplete**: interrupted." in shown.stdout
    assert "| tiny | 100.0, " in shown.stdout
    played(monkeypatch, 4)
    printed = json.loads(lowlat(*STEP, "--arms", "general,transformers", "--json", code=130).stdout)
    assert printed["incomplete"] == "interrupted"


def test_the_module_alone_keeps_rounds_too(folder, monkeypatch):
    played(monkeypatch, 4)
    with pytest.raises(KeyboardInterrupt):
        step.main([*STEP[1:9], "--arms", "general,transformers", "--results", str(folder)])
    assert only(folder).incomplete == "interrupted"


def test_a_floor_that_nothing_counts_costs_no_measurement(folder, monkeypatch):
    played(monkeypatch, 0)
    monkeypatch.setattr(random_v41, "make_v41", lambda *_: pytest.fail("a folder is given"))
    monkeypatch.setattr(step, "check_options", lambda options: None)
    monkeypatch.setattr(step, "check_weights", lambda *_: None)
    got = lowlat(
        "step", "--model", "deepseek-v41-tiny", "--model-folder", folder, "--random-folder", "--context", 16,
        "--arms", "general,read-floor", "--ceiling-gb", "0.01", "--device", "cpu", "--save", "--results", folder,
    )  # fmt: skip
    assert "read-floor was left out: nothing counts the bytes of deepseek-v41-tiny" in got.stderr
    assert [row.arm for row in only(folder).rows] == ["general"]


def test_a_run_that_ends_before_its_first_part_says_so(folder, monkeypatch, capsys):
    from lowlat.bench.keeper import Keeper

    with pytest.raises(KeyboardInterrupt), Keeper(True, folder):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "interrupted before a first part was measured: nothing is kept\n"
    with pytest.raises(ValueError, match="no server"), Keeper(True, folder):
        raise ValueError("no server")
    assert capsys.readouterr().err == ""
    assert list(folder.iterdir()) == []


# --- regions


class Regions:
    """Steps of one region; bare and marked ones come from two lists, as long as they last, and then an interruption."""

    note, batch, details = "", 1, {}

    def __init__(self, bare, marked):
        self._bare, self._marked = iter(bare), iter(marked)

    def bare(self):
        return [self._next(self._bare)]

    def marked(self):
        length = self._next(self._marked)
        return [[Span("layer", 0.0, length, 1, length), Span("other", 0.0, length, 0, 0.0)]]

    @staticmethod
    def _next(times):
        for time in times:
            return time
        raise KeyboardInterrupt

    def close(self):
        pass


def arms_of_regions(monkeypatch, *arms):
    waiting = iter(arms)
    monkeypatch.setattr("lowlat.bench.region_arms.build_region_arm", lambda name, case: build(next(waiting)))


def build(arm):
    if isinstance(arm, Exception):
        raise arm
    return arm


def test_turns_of_an_interrupted_first_arm_are_kept(folder, monkeypatch):
    arms_of_regions(monkeypatch, Regions([100.0] * 6, [101.0] * 6))
    lowlat(*REGIONS, "--save", "--results", folder, code=130)
    kept = only(folder)
    assert kept.incomplete == "interrupted"
    assert {row.details["region"]: row.instances for row in kept.rows} == {"layer": 4, "step": 4}


def test_turns_that_do_not_add_up_are_not_kept(folder, monkeypatch):
    arms_of_regions(monkeypatch, Regions([100.0] * 6, [110.0] * 6))
    lowlat(*REGIONS, "--save", "--results", folder, code=130)
    assert list(folder.iterdir()) == []


def test_one_arm_that_fails_leaves_the_others(folder, monkeypatch):
    good = Regions([100.0] * 50, [101.0] * 50)
    arms_of_regions(monkeypatch, base.ArmUnavailableError("no such library"), good)
    got = lowlat(*REGIONS, "--arms", "lowlat-cpu,general", "--save", "--results", folder, code=1)
    assert "lowlat-cpu: no such library" in got.stderr
    assert {row.arm for row in only(folder).rows} == {"general"}


# --- the A/B


def played_servers(monkeypatch, blocks, error=KeyboardInterrupt):
    """Blocks of the A/B without servers: `blocks` of them, and then `error`."""
    import contextlib

    class Server:
        def __init__(self, on):
            self.on, self.url, self.ready_s = on, "", 0.5
            self.process = type("Process", (), {"pid": int(on)})
            self.steps = 0

        def low_latency_steps(self):
            self.steps += 10
            return {"plugin": self.steps}

    servers = {on: Server(on) for on in (False, True)}
    done = []

    @contextlib.contextmanager
    def lending(sides):
        yield lambda on: contextlib.nullcontext(servers[on])

    def block(server, load, number):
        if number >= 0:
            if len(done) == blocks:
                raise error
            done.append((load.name, server.on))
        times = [(0.01 if server.on else 0.02) * (token + 1) for token in range(3)]
        record = Record(sent=0.0, content_times=times, ended=1.0, status=200, output_tokens=3)
        return ab.Block([record] * load.users)

    monkeypatch.setattr(ab, "_servers", lending)
    monkeypatch.setattr(ab, "_block", block)
    return done


def speeds(result):
    return {
        (row.workload, row.arm): row.samples
        for row in result.rows
        if row.metric == "tokens_per_s_user" and "speedup" not in row.workload
    }


@pytest.mark.parametrize("blocks", [1, 3, 4, 9])
def test_blocks_of_an_interrupted_load_are_kept(folder, monkeypatch, blocks):
    done = played_servers(monkeypatch, blocks)
    lowlat(*AB, "--users", "1,2", "--save", "--results", folder, code=130)
    kept = only(folder)
    assert kept.incomplete == "interrupted"
    assert len(done) == blocks
    users = {"8 in, 3 out, 1 users": 1, "8 in, 3 out, 2 users": 2}
    arms = {False: "general", True: "lowlat-cpu"}
    expected = {}
    for load, on in done:
        expected[load, arms[on]] = expected.get((load, arms[on]), 0) + users[load]
    assert speeds(kept) == expected
    # a ratio is of whole rounds alone: off, on, on, off
    whole = {load for load in users if sum(name == load for name, _ in done) >= 4}
    assert {row.workload.partition(":")[0] for row in kept.rows if row.metric == "speedup"} == whole
    assert {row.median for row in kept.rows if row.details.get("of") == "tokens_per_s_user"} == (
        {2.0} if whole else set()
    )


def test_a_request_that_fails_in_a_later_load_leaves_the_earlier(folder, monkeypatch):
    played_servers(monkeypatch, 8, RuntimeError("8 in, 3 out, 2 users: a request failed: HTTP 500"))
    got = lowlat(*AB, "--users", "1,2", "--save", "--results", folder, code=1)
    kept = only(folder)
    assert kept.incomplete == "8 in, 3 out, 2 users: a request failed: HTTP 500"
    assert {row.concurrency for row in kept.rows if row.metric == "tokens_per_s_user"} == {1}
    assert "error: 8 in, 3 out, 2 users: a request failed" in got.stderr


def test_kernels_that_do_not_run_end_the_ab_at_the_first_block_of_theirs(folder, monkeypatch):
    done = played_servers(monkeypatch, 100)
    got = lowlat(*AB, "--least-covered", "1", code=0)
    assert len(done) == 2 * 4 * 4
    monkeypatch.setattr(ab.Covered, "share", 0.2)
    done = played_servers(monkeypatch, 100)
    got = lowlat(*AB, code=1)
    assert "20% of the low-latency server's steps" in got.stderr
    assert [on for _, on in done] == [False, True]


# --- folders and stamps


@pytest.mark.parametrize("command", [STEP, REGIONS, AB])
def test_a_folder_that_takes_no_results_is_told_before_measuring(command, tmp_path, monkeypatch):
    for name in ("build_arm", "measure_ceiling"):
        monkeypatch.setattr(step, name, lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr("lowlat.bench.region_arms.build_region_arm", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(ab, "_servers", lambda *_: pytest.fail("measured"))
    file = tmp_path / "file"
    file.write_text("kept")
    assert f"{file} is a file" in lowlat(*command, "--save", "--results", file, code=1).stderr
    inside = lowlat(*command, "--save", "--results", file / "below", code=1).stderr
    assert f"results cannot be written into {file / 'below'}: Not a directory" in inside
    assert file.read_text() == "kept"
    assert "add --save" in lowlat(*command, "--results", tmp_path, code=1).stderr

    def refuses(*arguments, **fields):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuses)
    denied = lowlat(*command, "--save", "--results", tmp_path, code=1).stderr
    assert f"results cannot be written into {tmp_path}: Permission denied" in denied


def test_a_missing_folder_is_made_with_its_parents(tmp_path):
    place = tmp_path / "a" / "b"
    assert results.check_folder(place) == place
    assert list(place.iterdir()) == []


def test_the_module_alone_refuses_a_folder_and_numbers_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ceiling, "measure_ceiling", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (["--results", str(tmp_path / "file")], "is a file"), (["--rows", "x"], "invalid literal"),
        (["--ceiling-gb", "nan"], "--ceiling-gb"), (["--rounds", "0"], "rounds"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            step.main(["--model", "tiny", "--device", "cpu", *arguments])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [STEP, REGIONS])
def test_a_stamp_that_will_be_refused_is_told_before_measuring(command, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWLAT_COMMIT", "none")
    monkeypatch.setattr(step, "measure_ceiling", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr("lowlat.bench.region_arms.build_region_arm", lambda *_: pytest.fail("measured"))
    for wanted in (("--json",), ("--save", "--results", tmp_path)):
        assert "LOWLAT_COMMIT" in lowlat(*command, *wanted, code=1).stderr


@pytest.mark.parametrize(
    ("option", "message"), [("--perfetto", "is a file"), ("--timeline", "is a file")]
)  # fmt: skip
def test_pictures_that_cannot_be_written_are_told_before_measuring(option, message, tmp_path, monkeypatch):
    monkeypatch.setattr("lowlat.bench.region_arms.build_region_arm", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    assert message in lowlat(*REGIONS, option, tmp_path / "file" / "x.png", code=1).stderr
    assert "is a folder" in lowlat(*REGIONS, option, tmp_path, code=1).stderr


def test_a_result_that_ended_is_not_marked(tmp_path, folder, capsys):
    result = new_result("x", simulated=Simulated(weights=False), gpus=0)
    result.rows = [row_from_samples([1.0], workload="w", arm="general", metric="latency_ms")]
    kept = Keeper(True, folder)
    kept(result)
    finish(result, as_json=False, kept=kept)
    kept.__exit__(OSError, OSError("a picture that could not be written"), None)
    assert only(folder).incomplete == ""
