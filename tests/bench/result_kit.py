"""Results as tests write them down."""

from lowlat.bench.results import Result, Row, Simulated
from lowlat.bench.stamp import Machine


def machine(**fields):
    return Machine(gpu="NVIDIA H200", gpus=1, driver="580.1", cpu="x", torch="2.11.0", python="3.12.3", **fields)


def row(arm, median, *, spread=0.01, metric="step_us", **fields):
    defaults = {"workload": "llama-1b", "rows": 1, "context": 1024, "dtype": "bfloat16", "samples": 40}
    ends = {"low": median * (1 - spread), "high": median * (1 + spread)}
    return Row(arm=arm, metric=metric, median=median, **ends, **{**defaults, **fields})


def result(*rows, name="dense-step", date="2026-12-01T10:00:00Z", **fields):
    return Result(
        schema=1, name=name, date=date, commit="abcdef0123", command="lowlat bench step",
        machine=fields.pop("machine", machine()), simulated=Simulated(weights=True), read_ceiling_tb_s=4.5,
        rows=list(rows), **fields,
    )  # fmt: skip
