"""The conformance kit: a small reference engine, and checks that any kernel library can run against it.

    from lowlat_plugin.conformance import run_checks
    results = run_checks(candidate)

`lowlat plugins check NAME` prints the same, and `pytest --lowlat-kernels NAME` collects them as tests.
"""

from lowlat_plugin.conformance.case import Case, load_case
from lowlat_plugin.conformance.checks import CHECKS, CheckResult, run_check, run_checks
from lowlat_plugin.conformance.reference import ReferenceHost

__all__ = ["CHECKS", "Case", "CheckResult", "ReferenceHost", "load_case", "run_check", "run_checks"]
